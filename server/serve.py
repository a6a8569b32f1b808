"""Runs the HTTP server until it is told to stop; start-up failures are one sentence and exit code 2."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys

import uvicorn
from transformers.utils.logging import disable_progress_bar

from server.app import create_app
from server.auth import is_loopback
from server.settings import Settings
from verify.model import ModelError, load_tokenizer


def run(settings: Settings) -> int:
    """Serves; returns the process's exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
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

    app = create_app(settings, tokenizer, on_start, on_failure)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, server_header=False)
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
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
