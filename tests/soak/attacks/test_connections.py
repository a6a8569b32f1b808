"""Connections are held open without being read, up to a maximum number."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.soak.attacks import connections
from tests.soak.attacks.connections import HOLDS, HeldConnections, broken_requests, head, send_raw, whole
from tests.soak.attacks.target import Target
from tests.soak.attacks.targets import target

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


class Peer:
    """A server that counts connections and answers each of them."""

    def __init__(self) -> None:
        self.opened = self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        while data := await reader.read(1 << 16):
            writer.write(ANSWER if data.startswith(b"GET") else b"")
        writer.close()
        await writer.wait_closed()
        self.closed += 1


def run(body: Callable[[Target, Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        peer = Peer()
        async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
            await body(target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), peer)
            async with asyncio.timeout(5):
                while peer.closed < peer.opened:
                    await asyncio.sleep(0.005)

    asyncio.run(main())


def test_the_oldest_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HELD", 2)

    async def body(aim: Target, peer: Peer) -> None:
        held = HeldConnections(aim)
        for make in HOLDS.values():
            assert await held.hold(make(aim)) == "held"
        async with asyncio.timeout(5):
            while (peer.opened, peer.closed) != (len(HOLDS), len(HOLDS) - 2):
                await asyncio.sleep(0.005)
        held.close()

    run(body)


def test_raw_bytes_get_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.05)

    async def body(aim: Target, peer: Peer) -> None:
        assert await send_raw(aim, b"GET") == ("204", ANSWER)
        assert await send_raw(aim, b"POST") == ("waits", b"")

    run(body)
    assert asyncio.run(send_raw(target(), b"GET")) == ("refused", b"")


def test_heads_and_bodies_are_valid_http() -> None:
    request = whole(target(), n=2)
    top, _, content = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(content)}".encode() in top
    assert b"Bearer key-one" in top and b"Bearer other" in head(target(), "Content-Length: 1", key="other")


def test_broken_requests_differ() -> None:
    assert len(set(broken_requests(target()))) == len(broken_requests(target())) > 10
