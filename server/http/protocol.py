"""uvicorn's HTTP protocol with bounds: open connections, the time for a request to arrive, the time for a response to be read.

Knows nothing about the application. `BodyLimit` answers uploads that are too slow, because the application reads the body.

uvicorn does not document the classes in `uvicorn.protocols`. This module overrides methods of `HttpToolsProtocol`, and reads
its transport and the requests that it starts. Tested with uvicorn 0.54; `tests/server/http/test_protocol.py` names the
methods and attributes, and fails if one is missing. Without them, `Connections.protocol` can be replaced by uvicorn's own
"httptools", and a proxy such as nginx has to bound connections and slow clients: `limit_concurrency` bounds connections
without closing idle ones.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from outrider.server.http.errors import APIError
from outrider.server.settings import Server
from outrider.server.telemetry.metrics import Metrics

# This bounds a request line with its headers. It is checked whenever data arrives.
HEAD_BYTES = 1 << 16
# A connection has at most this many unanswered requests.
MAX_PIPELINED = 16


class Connections:
    """What the connections of a server share: their bounds, and the order in which they became idle."""

    def __init__(self, settings: Server, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._idle: OrderedDict[LimitedProtocol, None] = OrderedDict()  # longest idle first

    def protocol(self, config: Config, server_state: ServerState, app_state: dict[str, Any], **options: Any) -> LimitedProtocol:
        """A new connection; the factory that uvicorn calls."""
        return LimitedProtocol(self, config, server_state, app_state, **options)

    def mark_idle(self, connection: LimitedProtocol) -> None:
        """Records that the connection waits for a request."""
        self._idle[connection] = None

    def mark_busy(self, connection: LimitedProtocol) -> None:
        """Records that the connection has a request or is closed."""
        self._idle.pop(connection, None)

    def close_idle(self) -> bool:
        """Closes the connection that has been idle longest. False if none is idle."""
        # A connection with unsent data would stay open until its client has read it.
        found = next((each for each in self._idle if not each.transport.get_write_buffer_size()), None)
        if found is None:
            return False
        self.mark_busy(found)
        found.transport.close()
        return True


class Timer:
    """Calls `expire` after `seconds`, unless it is stopped or started again before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, expire: Callable[[], None]) -> None:
        self._loop, self._seconds, self._expire = loop, seconds, expire
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._expire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    It is idle while no request is being answered, and is closed after `read_seconds` of that, whether its client sends nothing,
    a part of a head, or a body that nobody reads. A connection with unsent data is aborted if its client takes none of it for
    `write_seconds`; the application then sees a disconnect.
    """

    def __init__(self, shared: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shared = shared
        self._cycles: deque[RequestResponseCycle] = deque()  # unanswered requests; all but the first are pipelined
        self._reading = Timer(self.loop, shared.settings.read_seconds, self._end_reading)
        self._writing = Timer(self.loop, shared.settings.write_seconds, self._end_writing)
        self._unsent_bytes = 0  # when the timer was started
        self._in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._shared.settings.max_connections:
            self._shared.metrics.closed_connections.labels("full").inc()
            if not self._shared.close_idle():
                return self._refuse(APIError(503, "The server has too many connections; retry later.", code="server_full"))
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.mark_busy(self)
        self._reading.stop()
        self._writing.stop()
        for cycle in self._cycles:  # uvicorn tells only the last one
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(
                    APIError(431, f"The headers are larger than {HEAD_BYTES} bytes; send less.", code="headers_too_large")
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Starts the request, or queues it behind those before it. Raises ValueError, which ends the connection."""
        if len(self._cycles) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")
        super().on_headers_complete()
        self._in_head = False
        self._cycles.append(self.cycle)
        self._shared.mark_busy(self)
        self._reading.stop()

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        super().on_response_complete()
        self._watch_unsent()
        if not self._cycles and not self.transport.is_closing():
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.stop()
        if not self._cycles:  # the last response is complete, but still not sent completely
            self._watch_unsent()

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError(400, "The request is not valid HTTP.", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Overrides a warning that any client could write to the log."""

    def _wait(self) -> None:
        """Waits for the next request."""
        self._shared.mark_idle(self)
        self._reading.start()

    def _end_reading(self) -> None:
        self._shared.metrics.closed_connections.labels("late").inc()
        self._shared.mark_busy(self)
        self.transport.close()

    def _watch_unsent(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        if self._unsent_bytes:
            self._writing.start()

    def _end_writing(self) -> None:
        if self.transport.get_write_buffer_size() >= self._unsent_bytes:
            self._shared.metrics.closed_connections.labels("stalled").inc()
            self.transport.abort()
        else:
            self._watch_unsent()

    def _refuse(self, error: APIError) -> None:
        """Answers a request that the application does not get, and closes the connection."""
        if not self._cycles:  # otherwise the response would end up inside another one
            response = error.response()
            head = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n".encode()
            lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
            close = [] if "connection" in response.headers else [b"connection: close\r\n"]
            self.transport.write(b"".join([head, *lines, *close, b"\r\n", bytes(response.body)]))
        self._shared.mark_busy(self)
        self._reading.stop()
        self.transport.close()
