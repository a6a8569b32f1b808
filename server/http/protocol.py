"""uvicorn's HTTP protocol with bounds: open connections, the time for a request to arrive, the time for a response to be read.

Promises that all bytes of a message beside its body, whatever they are, have one bound, that a request which is refused takes
no answer from those before it, and that a request with `Upgrade` is answered as one without. Knows nothing about the
application. `BodyLimit` answers uploads that are too slow, because the application reads the body.

uvicorn does not document the classes in `uvicorn.protocols`. This module overrides methods of `HttpToolsProtocol`, and reads
its transport and the requests that it starts. Tested with uvicorn 0.54; `tests/server/http/test_protocol.py` names the
methods and attributes, and fails if one is missing. Without them, `Connections.protocol` can be replaced by uvicorn's own
"httptools", and a proxy such as nginx has to bound connections and slow clients: `limit_concurrency` bounds connections
without closing idle ones.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from outrider.server.http.errors import CLIENT_CLOSED_REQUEST, APIError
from outrider.server.telemetry.metrics import Metrics

# This bounds the bytes of a message beside its body: request line, headers, chunk extensions, trailers.
HEAD_BYTES = 1 << 16
# A header of four bytes takes a hundred times as many in memory, so their number is bounded as well.
MAX_HEADERS = 256
# The parser gets this much at a time, so that the bounds are checked before it holds more.
PIECE_BYTES = 1 << 12
# A chunk's size in hexadecimal digits and its two line ends are not counted.
CHUNK_BYTES = 20
# The time for a request to arrive, and between requests.
READ_SECONDS = 30.0
# A client that reads nothing of a response for so long is disconnected.
WRITE_SECONDS = 60.0
# A connection has at most this many unanswered requests.
MAX_PIPELINED = 16
HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
TOO_LARGE = (
    f"The request has more than {HEAD_BYTES} bytes beside its body; send fewer or shorter headers, and no chunk extensions."
)


class Connections:
    """State that a server's connections share: their bounds, and the order in which they became idle."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        """`most` connections are open at a time; a further one replaces an idle one, or gets a 503 if none is idle."""
        self.most = most
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

    It is idle while no request is being answered, and is closed after READ_SECONDS of that, whether its client sends nothing,
    a part of a head, or a body that nobody reads. A connection with unsent data is aborted if its client takes none of it for
    WRITE_SECONDS; the application then sees a disconnect.
    """

    def __init__(self, shared: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shared = shared
        self._cycles: deque[RequestResponseCycle] = deque()  # unanswered requests; all but the first are pipelined
        self._reading = Timer(self.loop, READ_SECONDS, self._end_reading)
        self._writing = Timer(self.loop, WRITE_SECONDS, self._end_writing)
        self._unsent_bytes = 0  # when the timer was started
        # What is being received: a head, a body with its trailers, or nothing since the last message.
        self._part: Literal["none", "head", "body"] = "none"
        self._beside_bytes = 0  # of the message, or since the last one, that are no body; at most PIECE_BYTES are missing
        self._refusal: APIError | None = None  # the answer to what is being received; nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._shared.most:
            self._shared.metrics.closed_connections.labels("full").inc()
            if not self._shared.close_idle():
                return self._close_with(APIError(503, "The server has too many connections; retry later.", code="server_full"))
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
        """Parses the data in pieces, until a request is refused."""
        self._unset_keepalive_if_required()
        for start in range(0, len(data), PIECE_BYTES):
            if self._refusal is None and not self.transport.is_closing():
                self._parse(data[start : start + PIECE_BYTES])
        if self._refusal is not None:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        self._beside_bytes += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except HttpParserUpgrade as upgrade:  # the parser expects another protocol after the head
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = HttpRequestParser(self)  # the other one has ended if the connection is to be closed
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            except HttpParserError as error:
                cause = error.__context__
                invalid = APIError(400, "The request is not valid HTTP.", code="invalid_http")
                return self._refuse(cause if isinstance(cause, APIError) else invalid)
        if self._beside_bytes > HEAD_BYTES:
            self._refuse(APIError(431, TOO_LARGE, code="headers_too_large"))

    def _head_without_upgrade(self) -> bytes:
        """The head that was parsed, without the field that a server may ignore (RFC 9110, section 7.8)."""
        version = self.parser.get_http_version().encode()
        fields = (name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade")
        return b"".join([self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n", *fields, b"\r\n"])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part, self._beside_bytes = "head", 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header; trailers are dropped. Raises APIError."""
        if self._part != "head":
            return
        if len(self.headers) >= MAX_HEADERS:
            raise APIError(431, f"The request has more than {MAX_HEADERS} headers; send fewer.", code="headers_too_large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the request, or queues it behind those before it. Raises APIError."""
        self._check_head()
        if self.parser.should_upgrade():
            return  # the head is parsed again without it
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            end_with_connection(self.cycle)
        self._part = "body"
        cast(dict[str, Any], self.cycle.scope)["closed_status"] = partial(self._closed_status, self.cycle)
        self._cycles.append(self.cycle)
        self._shared.mark_busy(self)
        self._reading.stop()

    def _closed_status(self, cycle: RequestResponseCycle) -> int | None:
        """The status of a request whose answer nobody reads any more: its own refusal's, or that its client has left."""
        if not cycle.disconnected:
            return None
        is_refused = self._refusal is not None and self._part == "body" and cycle is self.cycle
        return self._refusal.status_code if is_refused and self._refusal else CLIENT_CLOSED_REQUEST

    def _check_head(self) -> None:
        """Raises APIError."""
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            raise APIError(431, TOO_LARGE, code="headers_too_large")
        hosts = [value for name, value in self.headers if name == b"host"]
        needed = self.parser.get_http_version() == "1.1"
        if len(hosts) > 1 or (needed and not hosts) or not all(map(HOST.fullmatch, hosts)):
            raise APIError(400, "The request needs one valid Host header.", code="invalid_http")
        if not needed and any(name == b"transfer-encoding" for name, _ in self.headers):
            raise APIError(400, "Only HTTP/1.1 has Transfer-Encoding; send a Content-Length.", code="invalid_http")
        if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in self.headers):
            raise APIError(400, "The only supported Transfer-Encoding is chunked.", code="unsupported_encoding")
        if self.parser.get_method() == b"CONNECT":
            raise APIError(400, "This server is no proxy; send another method than CONNECT.", code="invalid_http")
        if len(self._cycles) >= MAX_PIPELINED:
            message = f"A connection may have {MAX_PIPELINED} unanswered requests; wait for answers, then send this one again."
            raise APIError(429, message, code="too_many_pipelined")

    def on_chunk_header(self) -> None:
        self._beside_bytes = max(0, self._beside_bytes - CHUNK_BYTES)

    def on_body(self, body: bytes) -> None:
        self._beside_bytes = max(0, self._beside_bytes - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._part == "body":
            super().on_message_complete()
            self._part, self._beside_bytes = "none", 0

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        super().on_response_complete()
        self._watch_unsent()
        if not self._cycles and not self.transport.is_closing():
            if self._refusal is None:
                self._wait()
            else:
                self._close_with(self._refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.stop()
        if not self._cycles:  # the last response is complete, but still not sent completely
            self._watch_unsent()

    def _wait(self) -> None:
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
        """Reads no more, and answers the message that is being received with `error`, after the answers to those before it."""
        self._refusal = error
        if self._part == "body":  # its request has been passed on
            if not self._cycles or self.cycle.response_started:
                return self._close()
            self._cycles.pop()
            if self._cycles:
                self.pipeline.popleft()
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self._cycles:
            self._close_with(error)

    def _close_with(self, error: APIError) -> None:
        """Answers a request that the application does not get, and closes the connection."""
        response = error.response()
        head = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n".encode()
        lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        close = [] if "connection" in response.headers else [b"connection: close\r\n"]
        self.transport.write(b"".join([head, *lines, *close, b"\r\n", bytes(response.body)]))
        self._close()

    def _close(self) -> None:
        self._shared.mark_busy(self)
        self._reading.stop()
        self.transport.close()


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """Ends a response without a length by closing the connection: HTTP/1.0 has no chunks (RFC 9112, section 6.1)."""
    send, is_framed = cycle.send, True

    async def send_plain(message: Any) -> None:
        nonlocal is_framed
        if message["type"] == "http.response.start":
            is_framed = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if is_framed else False
        elif not is_framed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
