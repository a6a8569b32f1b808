"""The front end: the HTTP server of one model, with a worker that is already loading it."""

from __future__ import annotations

import contextlib
import socket
import sys

from outrider.server.app import create_app
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.http.server import address, api_address, new_server
from outrider.server.imports import frozen
from outrider.server.settings import Settings, SettingsError
from outrider.server.telemetry.tracing import TracingError


def serve(
    settings: Settings, listener: socket.socket, worker: WorkerProcess, metrics_listener: socket.socket | None = None
) -> int:
    """Serves on the listeners until a signal; returns the exit code. Raises SettingsError or ModelError."""
    failures: list[str] = []

    def on_failure(reason: str) -> None:
        print(f"outrider: {reason}", file=sys.stderr)
        failures.append(reason)
        server.should_exit = True

    def on_start() -> None:  # the server handles Ctrl-C now
        print(
            f"outrider: serving {settings.model.served_name} at {api_address(listener, settings.server)} (loading the model)",
            file=sys.stderr,
        )
        if metrics_listener is not None:
            print(f"outrider: metrics at {address(metrics_listener, settings.server)}/metrics", file=sys.stderr)

    try:
        with frozen():
            app = create_app(settings, load_tried_tokenizer(settings), on_start, on_failure)
    except TracingError as error:
        raise SettingsError(str(error)) from None
    app.state.engine.adopt(worker)
    server = new_server(app, settings, app.state.engine, metrics_listener)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 2 if failures else 0
