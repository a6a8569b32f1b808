"""The front end of several models: one HTTP server, whose pool loads a model when it is asked for."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable

from outrider.server.http.server import address, api_address, new_server
from outrider.server.models.app import create_app
from outrider.server.models.catalog import Entry
from outrider.server.settings import Settings


def serve(
    settings: Settings, entries: Iterable[Entry], listener: socket.socket, metrics_listener: socket.socket | None = None
) -> int:
    """Serves on the listeners until a signal; returns the exit code."""
    listed = list(entries)

    def on_start() -> None:
        names = ", ".join(entry.name for entry in listed)
        print(
            f"outrider: serving {names} at {api_address(listener, settings.server)} (each is loaded when it is asked for)",
            file=sys.stderr,
        )
        if metrics_listener is not None:
            print(f"outrider: metrics at {address(metrics_listener, settings.server)}/metrics", file=sys.stderr)

    app = create_app(settings, listed, on_start)
    server = new_server(app, settings, app.state.pool, metrics_listener)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0
