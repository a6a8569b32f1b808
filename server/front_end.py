"""The front end: the HTTP server of one model, with a worker that is already loading it."""

import contextlib
import socket
import sys
from functools import partial

from outrider.server.app import create_app
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.http.server import announce, new_server
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

    try:
        with frozen():
            name = settings.model.served_name
            start = partial(
                announce, name, settings.server, listener, metrics_listener, "loading the model"
            )  # the server handles Ctrl-C then
            app = create_app(settings, load_tried_tokenizer(settings), start, on_failure)
    except TracingError as error:
        raise SettingsError(str(error)) from None
    app.state.engine.adopt(worker)
    server = new_server(app, settings, app.state.engine, metrics_listener)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 2 if failures else 0
