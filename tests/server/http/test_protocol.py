"""Bounds of connections, by a virtual clock. test_server.py has the same bounds on real sockets."""

import asyncio
import json
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from outrider.server.http.protocol import (
    HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    READ_SECONDS,
    WRITE_SECONDS,
    Connections,
    LimitedProtocol,
)
from outrider.server.http.server import new_config
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from tests.server.http.test_sse import Timeless

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPLOAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
CHUNKED = UPLOAD.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")


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
    """A protocol around an application that answers /stream and /slow after `released` is set, and all else at once."""

    def __init__(self, max_connections: int = 1024) -> None:
        self.released = asyncio.Event()
        self.disconnected: list[str] = []
        self.metrics = Metrics()
        self.config = new_config(cast(Any, self), load_settings(None, {}), self.metrics, 1.0)
        self.state = ServerState()
        self.connections = Connections(max_connections, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        if scope["path"] in ("/stream", "/slow"):
            await self.released.wait()
        if scope["path"] == "/stream":
            await receive()
            if (await receive())["type"] == "http.disconnect":
                self.disconnected.append(scope["query_string"].decode())
        await send({"type": "http.response.body", "body": b"k"})

    def connect(self) -> tuple[LimitedProtocol, FakeTransport]:
        protocol = self.connections.protocol(self.config, self.state, {})
        transport = FakeTransport()
        protocol.connection_made(cast(Any, transport))
        return protocol, transport


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """A virtual clock."""
    return "asyncio", {"loop_factory": Timeless}


def closed(metrics: Metrics) -> dict[str, int]:
    """How many connections were closed, by reason."""
    samples = next(iter(metrics.closed_connections.collect())).samples
    return {s.labels["reason"]: int(s.value) for s in samples if s.name.endswith("_total") and s.value}


@pytest.mark.parametrize(
    "sent", [[], [b"GET /hea"], [b"\r\n"] * 100, [GET, *[b"\r\n"] * 100], [b"GET / HTTP/1.1\r\n", *[b"A: b\r\n"] * 100]]
)
async def test_a_connection_without_a_complete_request_is_closed(sent: list[bytes]) -> None:
    server = Served()
    protocol, transport = server.connect()
    for data in sent:
        if not transport.is_closing():
            protocol.data_received(data)
        await asyncio.sleep(1.0)
    await asyncio.sleep(READ_SECONDS)
    assert transport.ended == "closed"


async def test_a_body_that_nobody_reads_cannot_trickle_for_ever() -> None:
    server = Served()
    protocol, transport = server.connect()
    protocol.data_received(UPLOAD)  # answered without reading it
    for _ in range(40):
        if not transport.is_closing():
            protocol.data_received(b" ")
        await asyncio.sleep(1.0)
    assert transport.ended == "closed" and closed(server.metrics) == {"late": 1}


async def paused_stream(server: Served) -> tuple[LimitedProtocol, FakeTransport]:
    """A connection whose client has stopped to read a stream."""
    protocol, transport = server.connect()
    transport.reads_all = False
    protocol.data_received(GET.replace(b"/health", b"/stream"))
    await asyncio.sleep(1.0)
    protocol.pause_writing()
    return protocol, transport


async def test_a_reader_that_stands_still_is_aborted_and_a_slow_one_is_not() -> None:
    server = Served()
    protocol, transport = await paused_stream(server)
    for _ in range(20):
        transport.taken += 1
        await asyncio.sleep(0.9 * WRITE_SECONDS)
        assert transport.ended is None
    await asyncio.sleep(2 * WRITE_SECONDS)
    assert transport.ended == "aborted" and closed(server.metrics) == {"stalled": 1}
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("sent", "answers", "status"),
    [
        (GET.replace(b"/health", b"/slow") * 10_000, MAX_PIPELINED, 429),
        (GET.replace(b"/health", b"/slow") * 3 + b"\0", 3, 400),
        (GET.replace(b"/health", b"/slow") + b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 1, 400),
        (GET.replace(b"/health", b"/slow") + b"\r\n" * HEAD_BYTES, 1, 431),
        (
            GET.replace(b"/health", b"/slow") + UPLOAD.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked") + b"x",
            1,
            400,
        ),
    ],
    ids=["too many", "no HTTP", "two hosts", "line ends", "a broken body"],
)
async def test_a_refused_request_comes_after_the_answers_to_those_before_it(sent: bytes, answers: int, status: int) -> None:
    server = Served()
    protocol, transport = server.connect()
    protocol.data_received(sent)
    assert transport.ended is None and len(protocol.pipeline) == answers - 1
    server.released.set()
    await asyncio.sleep(1.0)
    statuses = [line for line in transport.written.split(b"\r\n") if b"HTTP/1.1 " in line]
    assert [int(line.partition(b"HTTP/1.1 ")[2][:3]) for line in statuses] == [200] * answers + [status]
    assert transport.ended == "closed"


async def test_a_new_connection_replaces_the_one_that_has_been_idle_longest() -> None:
    server = Served(max_connections=3)
    used = [server.connect() for _ in range(3)]
    used[0][0].data_received(GET.replace(b"/health", b"/slow"))  # busy
    used[1][0].data_received(GET)  # idle again, later than the third
    await asyncio.sleep(0.1)
    server.connect()
    assert [transport.ended for _, transport in used] == [None, None, "closed"]
    used[2][0].connection_lost(None)
    server.connect()
    assert [transport.ended for _, transport in used] == [None, "closed", "closed"]


async def test_a_full_server_refuses_a_connection_with_a_503() -> None:
    server = Served(max_connections=2)
    for _ in range(2):
        server.connect()[0].data_received(GET.replace(b"/health", b"/slow"))
    _, transport = server.connect()
    head, body = bytes(transport.written).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert {b"retry-after: 1", b"connection: close", b"content-length: %d" % len(body)} <= set(head.split(b"\r\n"))
    assert json.loads(body)["error"]["code"] == "server_full"
    assert transport.ended == "closed" and closed(server.metrics) == {"full": 1}


LINES = b"".join(b"a%d: b\r\n" % number for number in range(MAX_HEADERS))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([b"GET /health HTTP/1.1\r\n", *[b"a: " + b"b" * 1000 + b"\r\n"] * (2 + HEAD_BYTES // 1000)], 431),
        ([b"GET /health HTTP/1.1\r\nA: ", *[b"b" * 1000] * (2 + HEAD_BYTES // 1000)], 431),
        ([GET[:-2] + b"A: " + b"b" * HEAD_BYTES + b"\r\n\r\n"], 431),  # complete in one read
        ([b"GET /" + b"b" * HEAD_BYTES + GET[11:]], 431),
        ([GET[:-2] + LINES + b"\r\n"], 431),
        ([b"\r\n" * HEAD_BYTES], 431),
        ([b"\0\1\2\r\n\r\n"], 400),
        ([b"CONNECT example.org:443 HTTP/1.1\r\n\r\n"], 400),
        ([b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n"], 400),
        ([b"GET / HTTP/1.1\r\n\r\n"], 400),
        ([CHUNKED.replace(b"chunked", b"gzip, chunked")], 400),
        ([UPLOAD[:-2].replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n"], 400),
        *(([GET[:-2] + b"Host: " + host + b"\r\n\r\n"], 400) for host in (b"localhost", b"evil", b"")),
        *(([GET.replace(b"localhost", host)], 400) for host in (b"a b", b"a/b", b"user@a", b"a:b", b"[::1", b"\xe9")),
    ],
)
async def test_heads_that_are_too_large_or_not_http_are_refused(sent: list[bytes], status: int) -> None:
    protocol, transport = Served().connect()
    for data in sent:
        if not transport.is_closing():
            protocol.data_received(data)
    assert transport.written.startswith(b"HTTP/1.1 %d " % status) and transport.written.count(b"HTTP/1.1") == 1
    assert json.loads(transport.written.split(b"\r\n\r\n")[1])["error"]["type"] == "invalid_request_error"
    assert transport.ended == "closed"


# What can follow a head without being a body.
BESIDE = {
    "trailers": [b"1\r\nx\r\n0\r\n", b"a: b\r\n" * 4000],
    "an endless trailer": [b"1\r\nx\r\n0\r\na: ", b"b" * 20_000],
    "an endless name of a trailer": [b"0\r\n", b"b" * 20_000],
    "an endless chunk extension": [b"1;a=", b"b" * 20_000],
    "chunk extensions": [b"", b"1;a=" + b"b" * 1000 + b"\r\nx\r\n"],
    "an endless chunk size": [b"", b"0" * 20_000],
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("path", [b"/stream", b"/health"])  # refused before the answer, and after it
async def test_bytes_beside_a_body_are_bounded_and_kept_nowhere(beside: list[bytes], path: bytes) -> None:
    server = Served()
    protocol, transport = server.connect()
    protocol.data_received(CHUNKED.replace(b"/v1/completions", path))
    await asyncio.sleep(1.0)
    headers = len(protocol.headers)
    protocol.data_received(beside[0])
    received = 0
    while not transport.is_closing():
        protocol.data_received(beside[1])
        received += len(beside[1])
        assert received <= 2 * HEAD_BYTES
    assert len(protocol.headers) == headers and transport.written.count(b"HTTP/1.1") <= 1
    protocol.connection_lost(None)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"a, b"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_a_request_that_offers_an_upgrade_keeps_its_body(upgrade: bytes, size: int) -> None:
    protocol, transport = Served().connect()
    fields = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: " + upgrade + b"\r\n\r\n"
    bodies = {UPLOAD.replace(b"1000", b"3"): b"abc", CHUNKED: b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", GET: b""}
    for head, body in bodies.items():
        sent = head[:-4] + fields + body
        for start in range(0, len(sent), size):
            protocol.data_received(sent[start : start + size])
        assert bytes(protocol.cycle.body) == (b"abc" if body else b"") and not protocol.cycle.more_body
        assert b"upgrade" not in dict(protocol.headers)
        await asyncio.sleep(1.0)
    assert transport.written.count(b"HTTP/1.1 200") == len(bodies) and transport.ended is None
