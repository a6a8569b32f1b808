"""Bounds of connections, by a virtual clock. test_server.py has the same bounds on real sockets."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from outrider.server.http.protocol import HEAD_BYTES, MAX_PIPELINED, Connections, LimitedProtocol
from outrider.server.http.server import new_config
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from tests.server.http.test_sse import Timeless

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPLOAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
READ_SECONDS, WRITE_SECONDS = 30.0, 60.0  # the defaults


class FakeTransport:
    """A transport whose client reads only what `taken` says."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.taken = 0  # bytes; the rest is unsent
        self.reads_all = True
        self.ended: str | None = None

    def get_extra_info(self, name: str) -> Any:
        return None

    def get_write_buffer_size(self) -> int:
        return 0 if self.reads_all else len(self.written) - self.taken

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def is_closing(self) -> bool:
        return self.ended is not None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Served:
    """A protocol around an application that answers /stream after `released` is set, and all else at once."""

    def __init__(self, **settings: Any) -> None:
        self.released = asyncio.Event()
        self.disconnected: list[str] = []
        self.metrics = Metrics()
        self.settings = load_settings(None, {f"server.{name}": value for name, value in settings.items()})
        self.config = new_config(cast(Any, self), self.settings, self.metrics, 1.0)
        self.state = ServerState()
        self.connections = Connections(self.settings.server, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        if scope["path"] == "/stream":
            await self.released.wait()
            await receive()
            if (await receive())["type"] == "http.disconnect":
                self.disconnected.append(scope["query_string"].decode())
        await send({"type": "http.response.body", "body": b"k"})

    def connect(self) -> tuple[LimitedProtocol, FakeTransport]:
        protocol = self.connections.protocol(self.config, self.state, {})
        transport = FakeTransport()
        protocol.connection_made(cast(Any, transport))
        return protocol, transport


def run(test: Coroutine[None, None, None]) -> None:
    """Runs a test with a virtual clock."""
    with asyncio.Runner(loop_factory=Timeless) as runner:
        runner.run(test)


def closed(metrics: Metrics) -> dict[str, int]:
    """How many connections were closed, by reason."""
    samples = next(iter(metrics.closed_connections.collect())).samples
    return {s.labels["reason"]: int(s.value) for s in samples if s.name.endswith("_total") and s.value}


# The methods of uvicorn's that are overridden or called, and their parameters.
METHODS = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_headers_complete": ["self"],
    "on_response_complete": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "send_400_response": ["self", "msg"],
    "_unsupported_upgrade_warning": ["self"],
}


def test_uvicorns_protocol_has_what_is_overridden_and_read() -> None:
    here = f"uvicorn {version('uvicorn')}; protocol.py says what to use instead."
    for name, parameters in METHODS.items():
        method = getattr(HttpToolsProtocol, name, None)
        assert method is not None, f"HttpToolsProtocol has no {name} in {here}"
        assert list(inspect.signature(method).parameters) == parameters, f"The parameters of {name} are others in {here}"
    source = inspect.getsource(HttpToolsProtocol)
    for call in ("self.send_400_response(", "self._unsupported_upgrade_warning()", "on_response=self.on_response_complete"):
        assert call in source, f"HttpToolsProtocol does not have {call!r} any more in {here}"

    async def test() -> None:
        protocol, _ = Served().connect()
        protocol.data_received(GET.replace(b"/health", b"/stream"))
        for name in ("loop", "transport", "connections", "pipeline"):
            assert hasattr(protocol, name), f"HttpToolsProtocol does not set {name} in {here}"
        assert isinstance(protocol.cycle, RequestResponseCycle), f"HttpToolsProtocol does not set cycle in {here}"
        for name in ("disconnected", "message_event"):
            assert hasattr(protocol.cycle, name), f"RequestResponseCycle does not set {name} in {here}"
        protocol.connection_lost(None)

    run(test())


@pytest.mark.parametrize(
    "sent", [[], [b"GET /hea"], [b"\r\n"] * 100, [GET, *[b"\r\n"] * 100], [b"GET / HTTP/1.1\r\n", *[b"A: b\r\n"] * 100]]
)
def test_a_connection_without_a_complete_request_is_closed(sent: list[bytes]) -> None:
    async def test() -> None:
        server = Served()
        protocol, transport = server.connect()
        for data in sent:
            if not transport.is_closing():
                protocol.data_received(data)
            await asyncio.sleep(1.0)
        await asyncio.sleep(READ_SECONDS)
        assert transport.ended == "closed"

    run(test())


def test_a_body_that_nobody_reads_cannot_trickle_for_ever() -> None:
    async def test() -> None:
        server = Served()
        protocol, transport = server.connect()
        protocol.data_received(UPLOAD)  # answered without reading it
        for _ in range(40):
            if not transport.is_closing():
                protocol.data_received(b" ")
            await asyncio.sleep(1.0)
        assert transport.ended == "closed" and closed(server.metrics) == {"late": 1}

    run(test())


def test_a_silent_stream_is_not_cut() -> None:
    async def test() -> None:
        server = Served()
        protocol, transport = server.connect()
        protocol.data_received(GET.replace(b"/health", b"/stream"))
        await asyncio.sleep(100 * WRITE_SECONDS)
        assert transport.ended is None
        server.released.set()

    run(test())


def test_requests_on_one_connection_get_their_time_anew() -> None:
    async def test() -> None:
        _, transport = (served := Served()).connect()
        protocol = next(iter(served.state.connections))
        for _ in range(20):
            cast(LimitedProtocol, protocol).data_received(GET)
            await asyncio.sleep(4.0)  # less than uvicorn's keep-alive time
        assert transport.ended is None and transport.written.count(b"HTTP/1.1 200") == 20

    run(test())


async def paused_stream(server: Served) -> tuple[LimitedProtocol, FakeTransport]:
    """A connection whose client has stopped to read a stream."""
    protocol, transport = server.connect()
    transport.reads_all = False
    protocol.data_received(GET.replace(b"/health", b"/stream"))
    await asyncio.sleep(1.0)
    protocol.pause_writing()
    return protocol, transport


def test_a_reader_that_stands_still_is_aborted_and_a_slow_one_is_not() -> None:
    async def test() -> None:
        server = Served()
        protocol, transport = await paused_stream(server)
        for _ in range(20):
            transport.taken += 1
            await asyncio.sleep(0.9 * WRITE_SECONDS)
            assert transport.ended is None
        await asyncio.sleep(2 * WRITE_SECONDS)
        assert transport.ended == "aborted" and closed(server.metrics) == {"stalled": 1}
        protocol.connection_lost(None)

    run(test())


def test_a_paused_reader_that_continues_is_not_aborted() -> None:
    async def test() -> None:
        protocol, transport = await paused_stream(Served())
        protocol.resume_writing()
        await asyncio.sleep(10 * WRITE_SECONDS)
        assert transport.ended is None
        protocol.connection_lost(None)

    run(test())


def test_the_end_of_a_response_cannot_stay_unread_for_ever() -> None:
    """The transport closes only after it has sent everything, and reports no pause for a small rest."""

    async def test() -> None:
        protocol, transport = Served().connect()
        transport.reads_all = False
        protocol.data_received(GET)
        await asyncio.sleep(2 * WRITE_SECONDS)
        assert transport.ended == "aborted"

    run(test())


def test_a_disconnect_reaches_every_pipelined_request() -> None:
    async def test() -> None:
        server = Served()
        protocol, _ = server.connect()
        protocol.data_received(b"".join(GET.replace(b"/health", b"/stream?%d" % number) for number in range(3)))
        await asyncio.sleep(1.0)
        protocol.connection_lost(None)
        server.released.set()
        await asyncio.sleep(1.0)
        assert server.disconnected == ["0"]  # the others were never started
        assert not server.state.tasks and not server.state.connections

    run(test())


def test_a_flood_of_pipelined_requests_ends_the_connection() -> None:
    async def test() -> None:
        protocol, transport = Served().connect()
        protocol.data_received(GET.replace(b"/health", b"/stream") * 10_000)
        assert transport.ended == "closed"
        assert len(protocol.pipeline) < MAX_PIPELINED
        protocol.connection_lost(None)
        await asyncio.sleep(1.0)

    run(test())


def test_a_lost_connection_leaves_nothing_behind() -> None:
    async def test() -> None:
        server = Served()
        loop = asyncio.get_running_loop()
        for sent in (b"", GET, GET[:9], UPLOAD):
            protocol, transport = server.connect()
            transport.reads_all = False
            protocol.data_received(sent) if sent else None
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            protocol.pause_writing()
            protocol.connection_lost(None)
        await asyncio.sleep(0)
        assert not server.connections.close_idle()
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    run(test())


def test_a_new_connection_replaces_the_one_that_has_been_idle_longest() -> None:
    async def test() -> None:
        server = Served(max_connections=3)
        used = [server.connect() for _ in range(3)]
        used[0][0].data_received(GET.replace(b"/health", b"/stream"))  # busy
        used[1][0].data_received(GET)  # idle again, later than the third
        await asyncio.sleep(0.1)
        server.connect()
        assert [transport.ended for _, transport in used] == [None, None, "closed"]
        used[2][0].connection_lost(None)
        server.connect()
        assert [transport.ended for _, transport in used] == [None, "closed", "closed"]

    run(test())


def test_a_full_server_refuses_a_connection_with_a_503() -> None:
    async def test() -> None:
        server = Served(max_connections=2)
        for _ in range(2):
            server.connect()[0].data_received(GET.replace(b"/health", b"/stream"))
        _, transport = server.connect()
        head, body = bytes(transport.written).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert {b"retry-after: 1", b"connection: close", b"content-length: %d" % len(body)} <= set(head.split(b"\r\n"))
        assert json.loads(body)["error"]["code"] == "server_full"
        assert transport.ended == "closed" and closed(server.metrics) == {"full": 1}

    run(test())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([b"GET /health HTTP/1.1\r\n", *[b"a: " + b"b" * 1000 + b"\r\n"] * (2 + HEAD_BYTES // 1000)], 431),
        ([b"GET /health HTTP/1.1\r\nA: ", *[b"b" * 1000] * (2 + HEAD_BYTES // 1000)], 431),
        ([b"\0\1\2\r\n\r\n"], 400),
        ([b"CONNECT example.org:443 HTTP/1.1\r\n\r\n"], 400),
    ],
)
def test_heads_that_are_too_large_or_not_http_are_refused(sent: list[bytes], status: int) -> None:
    async def test() -> None:
        protocol, transport = Served().connect()
        for data in sent:
            if not transport.is_closing():
                protocol.data_received(data)
        assert transport.written.startswith(b"HTTP/1.1 %d " % status) and transport.written.count(b"HTTP/1.1") == 1
        assert json.loads(transport.written.split(b"\r\n\r\n")[1])["error"]["type"] == "invalid_request_error"
        assert transport.ended == "closed"

    run(test())
