"""Arbitrary bytes on real sockets: the parser holds a bounded number of them, and the server answers others."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.server.http.protocol import HEAD_BYTES, PIECE_BYTES, LimitedProtocol
from tests.server.fakes import FakeEngine
from tests.server.http.test_protocol import BESIDE, CHUNKED, GET, UPLOAD
from tests.server.http.test_server import connect, read_all, serving

READ_BYTES = 1 << 18  # what asyncio reads at once
SENT_BYTES = 8 << 20

HEADS = [GET, UPLOAD, CHUNKED, GET[:-2], CHUNKED[:-2], b"Host: a\r\n", b"Upgrade: h2c\r\nConnection: upgrade\r\n"]
PARTS = [*HEADS, *(each for beside in BESIDE.values() for each in beside)]
# Indexes into PARTS, whose values are too long to print, or any bytes.
parts = st.integers(0, len(PARTS) - 1) | st.binary(max_size=64)


def send(port: int, sent: Sequence[bytes]) -> bytes:
    """Sends bytes until the server closes the connection; returns its answer."""
    with connect(port) as connection:
        with contextlib.suppress(OSError):
            for each in sent:
                connection.sendall(each)
            connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("path", [b"/health", b"/v1/completions"])
def test_a_flood_beside_a_body_ends_the_connection(beside: list[bytes], path: bytes) -> None:
    with serving(FakeEngine("a"), auth__keys={"alice": "a-key-of-some-length"}) as port, connect(port) as connection:
        connection.sendall(CHUNKED.replace(b"/v1/completions", path) + beside[0])
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < SENT_BYTES and not (select.select([connection], [], [], 0)[0] and not connection.recv(1 << 16)):
                connection.sendall(beside[1])
                sent += len(beside[1])
        assert sent < SENT_BYTES
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


@pytest.mark.slow
def test_arbitrary_bytes_are_held_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    parse = LimitedProtocol._parse

    def watched(self: LimitedProtocol, data: bytes) -> None:
        parse(self, data)
        headers = sum(len(name) + len(value) for name, value in self.headers or ())
        held.append(self._beside_bytes + headers + sum(len(cycle.body) for cycle in self._cycles))

    monkeypatch.setattr(LimitedProtocol, "_parse", watched)
    with serving(FakeEngine("a"), server__read_seconds=0.2) as port:

        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(parts, max_size=12), st.integers(1, 64))
        def check(chosen: list[int | bytes], repeated: int) -> None:
            sent = [PARTS[each] if isinstance(each, int) else each for each in chosen]
            send(port, [*sent, *sent[-1:] * repeated])
            assert max(held, default=0) <= 2 * HEAD_BYTES + 2 * PIECE_BYTES + 2 * READ_BYTES
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200

        check()
