"""The HTTP server around several models."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable

from transformers.utils.logging import disable_progress_bar

from outrider.server.front_end import GRACE_SECONDS, SPARE_FILES, DrainingServer, MetricsServer, allow_open_files, new_config
from outrider.server.http.exposition import create_metrics_app
from outrider.server.models.app import create_app
from outrider.server.models.catalog import Entry
from outrider.server.settings import Settings


def serve(
    settings: Settings, entries: Iterable[Entry], listener: socket.socket, metrics_listener: socket.socket | None = None
) -> int:
    """Serves on the listeners until a signal; returns the exit code."""
    disable_progress_bar()
    listed = list(entries)

    def on_start() -> None:
        host, port = listener.getsockname()[:2]
        names = ", ".join(entry.name for entry in listed)
        print(f"outrider: serving {names} at http://{host}:{port}/v1 (each is loaded when it is asked for)", file=sys.stderr)

    app = create_app(settings, listed, on_start)
    allow_open_files(settings.server.max_connections + SPARE_FILES)
    metrics_server = None
    if metrics_listener is not None:
        page = create_metrics_app(settings, app.state.metrics_page)
        metrics_server = MetricsServer(new_config(page, settings, app.state.metrics, GRACE_SECONDS), metrics_listener)
    config = new_config(app, settings, app.state.metrics, settings.server.drain_seconds + GRACE_SECONDS)
    server = DrainingServer(config, app.state.pool, settings.server.drain_seconds, metrics_server)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0
