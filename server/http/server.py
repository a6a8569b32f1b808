"""The HTTP server around an application: bounded connections, metrics on a port of their own, and a drain at signals."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from math import ceil
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from fastapi import FastAPI

from outrider.server.http.exposition import create_metrics_app
from outrider.server.http.protocol import READ_SECONDS, Connections
from outrider.server.http.tls import server_context
from outrider.server.settings import Server, Settings
from outrider.server.system import allow_open_files
from outrider.server.telemetry.metrics import Metrics

# A server has this many connections, or two for each request that may run or wait if that is more.
MAX_CONNECTIONS = 1024
# The process needs this many open files in addition to its connections.
SPARE_FILES = 256
# After the drain, streams have this time to send their error.
GRACE_SECONDS = 2.0
# uvicorn takes whole seconds, and drains may have no end.
LONGEST_SECONDS = 1e9


class MetricsServer(uvicorn.Server):
    """The HTTP server of `metrics.port`: handles no signals, runs until it is stopped."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    def start(self) -> None:
        self._task = asyncio.create_task(self.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        self.should_exit = True
        if self._task is not None:
            await self._task


class Drainable(Protocol):
    """An engine, or the engines of several models."""

    def drain(self) -> None:
        """Refuses new requests from now on; accepted ones continue."""

    def abort(self) -> None:
        """Fails all requests."""


class DrainingServer(uvicorn.Server):
    """Drains at the first signal: refuses new requests, finishes accepted ones, and fails the others at a deadline.

    A second signal fails them at once and gives clients GRACE_SECONDS to read that; a third waits for nothing. A metrics
    server starts and ends with it.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Drainable, drain_seconds: float, metrics_server: MetricsServer | None = None
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._metrics_server = metrics_server
        self._signals = 0  # number of signals received
        self._loop: asyncio.AbstractEventLoop | None = None  # None before the start

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self.should_exit = True
        if self._signals == 2 and self._loop is not None:
            self._loop.call_soon_threadsafe(self._engine.abort)
            self._loop.call_soon_threadsafe(self._loop.call_later, GRACE_SECONDS, self._force_exit)
        elif self._signals > 1:
            self._force_exit()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drains also when the terminal is closed, unless the process was started to outlive it, as by nohup."""
        with super().capture_signals():
            is_main = threading.current_thread() is threading.main_thread()
            if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or not is_main:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def _force_exit(self) -> None:
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._metrics_server is not None:
            self._metrics_server.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains the engine while uvicorn closes its connections."""
        self._engine.drain()
        deadline = asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.abort)
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # uvicorn skips it, and then cancels the application, whose error would be logged
                await self.lifespan.shutdown()
        finally:
            deadline.cancel()
            if self._metrics_server is not None:
                await self._metrics_server.stop()


def new_server(
    app: FastAPI, settings: Settings, engine: Drainable, metrics_listener: socket.socket | None = None
) -> DrainingServer:
    """The server of an application whose requests `engine` answers. `app.state` has its metrics, and their page."""
    allow_open_files(max_connections(settings) + SPARE_FILES)
    metrics_server = None
    if metrics_listener is not None:
        page = create_metrics_app(settings, app.state.metrics_page)
        metrics_server = MetricsServer(new_config(page, settings, app.state.metrics, GRACE_SECONDS), metrics_listener)
    config = new_config(app, settings, app.state.metrics, settings.server.drain_seconds + GRACE_SECONDS)
    return DrainingServer(config, engine, settings.server.drain_seconds, metrics_server)


def new_config(app: FastAPI, settings: Settings, metrics: Metrics, grace_seconds: float) -> uvicorn.Config:
    """uvicorn's configuration of a server with bounded connections, and TLS if it is set. Raises SettingsError."""
    tls = server_context(settings.server)
    return uvicorn.Config(
        app,
        http=cast(Any, Connections(max_connections(settings), metrics).protocol),
        ws="none",
        log_level="warning",
        log_config=None,
        timeout_graceful_shutdown=ceil(min(grace_seconds, LONGEST_SECONDS)),
        # uvicorn's 5 s are also those of httpx, which then loses a request that it sends as the connection is closed.
        timeout_keep_alive=ceil(READ_SECONDS),
        server_header=False,
        proxy_headers=bool(settings.server.trusted_proxies),
        forwarded_allow_ips=list(settings.server.trusted_proxies),
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


def max_connections(settings: Settings) -> int:
    return max(MAX_CONNECTIONS, 2 * (settings.scheduling.most_active + settings.scheduling.max_waiting))


def announce(names: str, settings: Server, listener: socket.socket, metrics_listener: socket.socket | None, state: str) -> None:
    """Tells on stderr where the models of these names are served, and the metrics if they have a port of their own."""
    print(f"outrider: serving {names} at {api_address(listener, settings)} ({state})", file=sys.stderr)
    if metrics_listener is not None:
        print(f"outrider: metrics at {address(metrics_listener, settings)}/metrics", file=sys.stderr)


def address(listener: socket.socket, settings: Server) -> str:
    """The URL of a listening socket, or `unix:` and the path of a UNIX socket."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'http' if settings.tls_certificate is None else 'https'}://{host}:{name[1]}"


def api_address(listener: socket.socket, settings: Server) -> str:
    """The base URL of OpenAI's clients, or a UNIX socket."""
    found = address(listener, settings)
    return found if found.startswith("unix:") else f"{found}{settings.path_prefix or ''}/v1"
