"""The front end: the HTTP server around the application, with a worker that is already loading."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from math import ceil
from types import FrameType

import uvicorn
from transformers.utils.logging import disable_progress_bar

from server.app import create_app
from server.engine.engine import Engine
from server.engine.worker_process import WorkerProcess
from server.http.auth import is_loopback
from server.settings import Settings, SettingsError
from server.telemetry.tracing import TracingError
from verify.tokenizer import load_tokenizer

GRACE_SECONDS = 2.0  # after the drain, for streams to send their error


class DrainingServer(uvicorn.Server):
    """Drains at the first signal: refuses new requests, finishes accepted ones, and fails the others at a deadline.

    A second signal ends it at once.
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
        """Drains the engine while uvicorn closes its connections."""
        self._engine.drain()
        deadline = asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.abort)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()


def serve(settings: Settings, listener: socket.socket, worker: WorkerProcess) -> int:
    """Serves on `listener` until a signal; returns the exit code. Raises SettingsError or ModelError."""
    check_address(settings)
    failures: list[str] = []

    def on_failure(reason: str) -> None:
        print(f"outrider: {reason}", file=sys.stderr)
        failures.append(reason)
        server.should_exit = True

    def on_start() -> None:  # from here on the server handles Ctrl-C
        host, port = listener.getsockname()[:2]
        address = f"http://{host}:{port}/v1"
        print(f"outrider: serving {settings.model.served_name} at {address} (loading the model)", file=sys.stderr)

    server = create_server(settings, worker, on_start, on_failure)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 2 if failures else 0


def check_address(settings: Settings) -> None:
    """Raises SettingsError if the server would be open to the network without API keys."""
    if not (settings.auth.keys or settings.auth.open or is_loopback(settings.server.host)):
        raise SettingsError(
            f"{settings.server.host} is a public address and there are no API keys; set auth.keys or auth.file, "
            "or set --auth.open true if something else controls access."
        )


def create_server(
    settings: Settings, worker: WorkerProcess, on_start: Callable[[], None], on_failure: Callable[[str], None]
) -> DrainingServer:
    """The HTTP server around the application. Raises SettingsError or ModelError."""
    disable_progress_bar()
    tokenizer = load_tokenizer(settings.model.path, settings.model.trust_remote_code)
    try:
        app = create_app(settings, tokenizer, on_start, on_failure)
    except TracingError as error:
        raise SettingsError(str(error)) from None
    engine: Engine = app.state.engine
    engine.adopt(worker)
    grace_seconds = ceil(settings.server.drain_seconds + GRACE_SECONDS)
    config = uvicorn.Config(
        app, log_level="warning", log_config=None, timeout_graceful_shutdown=grace_seconds, server_header=False
    )
    return DrainingServer(config, engine, settings.server.drain_seconds)
