"""Arbitrary bytes on real sockets: the parser holds a bounded number of them, and the server answers others."""

from __future__ import annotations

import contextlib
import select

import httpx
import pytest

from tests.server.fakes import FakeEngine
from tests.server.http.test_protocol import BESIDE, CHUNKED
from tests.server.http.test_server import connect, serving

SENT_BYTES = 8 << 20


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
