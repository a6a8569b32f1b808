"""Runs the HTTP server until it is told to stop; start-up failures are one sentence and exit code 2."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
from math import ceil
from types import FrameType

import uvicorn
from transformers.utils.logging import disable_progress_bar

from server.engine.engine import Engine
from server.http.app import create_app
from server.http.auth import is_loopback
from server.settings import Settings
from server.telemetry.logs import configure
from server.telemetry.tracing import TracingError
from verify.errors import ModelError
from verify.tokenizer import load_tokenizer

log = logging.getLogger("outrider")
GRACE_SECONDS = 2.0  # for the errors that end what the drain did not


class DrainingServer(uvicorn.Server):
    """At the first signal it takes no more requests, answers those that are here, and ends the rest at a deadline.

    At a second signal it ends.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What uvicorn does once it shall end."""
        self._engine.drain()
        deadline = asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.abort)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()


def run(settings: Settings) -> int:
    """Serves; returns the process's exit code."""
    configure(settings.logging)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bar()
    if not (settings.auth.keys or settings.auth.open or is_loopback(settings.server.host)):
        print(
            f"outrider: {settings.server.host} is a public address and there are no API keys; set auth.keys or auth.file, "
            "or say --auth.open true where something else keeps strangers out.",
            file=sys.stderr,
        )
        return 2
    try:
        tokenizer = load_tokenizer(settings.model.path, settings.model.trust_remote_code)
        listener = listen(settings.server.host, settings.server.port)
    except (ModelError, OSError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    failures: list[str] = []

    def on_failure(why: str) -> None:
        print(f"outrider: {why}", file=sys.stderr)
        failures.append(why)
        server.should_exit = True

    host, port = listener.getsockname()[:2]

    def on_start() -> None:  # from here on Ctrl-C is the server's to handle
        address = f"http://{host}:{port}/v1"
        print(f"outrider: serving {settings.model.served_name} at {address} (loading the model)", file=sys.stderr)

    try:
        app = create_app(settings, tokenizer, on_start, on_failure)
    except TracingError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    last = settings.server.drain_seconds + GRACE_SECONDS
    config = uvicorn.Config(
        app, log_level="warning", log_config=None, timeout_graceful_shutdown=ceil(last), server_header=False
    )
    gc.freeze()  # or the collector looks through all of torch again and again, and every stream stands still meanwhile
    server = DrainingServer(config, app.state.engine, settings.server.drain_seconds)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    gc.unfreeze()
    return 2 if failures else 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with a sentence where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # from now on clients wait instead of being refused
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(f"Cannot listen on {host}:{port} ({reason}); choose another --port or stop what uses it.") from None
    return listener
