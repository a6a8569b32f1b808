"""Attacks: whatever bytes a client sends, and forged headers and names; the server stays healthy, and keeps none of them."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.requests import body
from tests.servers import CAROL, Served, read_metrics, resident_mb

WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
# Twelve of the largest pieces are three times what the memory may grow by.
MOST_MB = 64.0
LARGE = st.sampled_from([0, 1 << 10, 1 << 16, 1 << 24]).map(lambda size: b"a" * size)
LINES = [b"GET /health HTTP/1.1", b"GET / HTTP/9.9", b"GET http://evil.example/v1/models HTTP/1.1", b"GET //v1/models HTTP/1.1"]
LINES += [b"OPTIONS * HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"POST /v1/completions", b"PRI * HTTP/2.0"]
LINES += [b"POST /v1/chat/completions HTTP/1.0", b"HEAD /v1/models HTTP/1.1", b"Host: localhost", b"Host: evil"]
LINES += [b"Content-Type: application/json", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked"]
LINES += [b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: " + b"9" * 20, b"Content-Length: " + b"9" * 5000]
LINES += [b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings", b"Expect: 100-continue", b"Connection: close", b"Trailer: X"]
LINES += [b"X: y\r\n" * 4999 + b"X: y", b"5\r\nhello", b"zz\r\n{}", b"fffffffffffffffff", b"0", b""]
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
PIECES = st.one_of(
    st.sampled_from([*(line + b"\r\n" for line in LINES), TLS_HELLO, b'{"a":', b"[" * 500, b"\0" * 500, WHOLE]),
    st.binary(max_size=200),
    st.tuples(st.sampled_from([b"X-Long: ", b"5;name=", b"X: y\r\nX-Trailer: "]), LARGE).map(
        lambda pair: b"".join(pair) + b"\r\n"
    ),
)


# What makes the parser read on.
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
STARTS = st.sampled_from([b"", WHOLE[:-2], HEAD, HEAD + b"5\r\nhello\r\n", HEAD + b"0\r\n"])


def send(server: Served, pieces: list[bytes], most_mb: float = float("inf")) -> bytes:
    """What the server answers to these bytes, sent piece by piece, until it closes the connection.

    Its memory may have `most_mb` after each piece.
    """
    parts = urlsplit(server.url)
    assert parts.hostname and parts.port
    answer = b""
    with socket.create_connection((parts.hostname, parts.port), 60) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                assert resident_mb(server.process.pid) < most_mb
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(1 << 16):
                answer += received
        except TimeoutError:
            raise
        except OSError:
            pass  # it has closed the connection before all was sent
    return answer


@pytest.mark.slow
def test_any_bytes_leave_the_server_healthy_and_its_memory_as_it_was(guarded: Served) -> None:
    for _ in range(20):
        send(guarded, [WHOLE])
    before = resident_mb(guarded.process.pid)

    @settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STARTS, PIECES, st.integers(0, 12), st.lists(PIECES, max_size=6))
    def test(start: bytes, repeated: bytes, times: int, rest: list[bytes]) -> None:
        answer = send(guarded, [start, *[repeated] * times, *rest], before + MOST_MB)
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:80]
        assert b" 500 " not in answer.partition(b"\r\n")[0]
        assert guarded.http.get("/health").status_code == 200

    test()
    assert send(guarded, [WHOLE]).startswith(b"HTTP/1.1 200")


@pytest.fixture(scope="module")
def server(guarded: Served) -> Iterator[Served]:
    """Clients with a request quota."""
    with guarded.login(CAROL) as server:
        yield server


def test_names_are_never_paths(server: Served) -> None:
    for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/v1/responses/..%2f..%2fx"):
        response = server.http.get(path)
        assert response.status_code == 404
        assert "root:" not in response.text
    for session in ("../../x", "/etc/passwd", "\x00", "a" * 256):
        assert server.http.post("/v1/completions", json=body(server, max_tokens=1, session_id=session)).status_code == 200
    assert not Path("/etc/passwd.cost").exists()


def test_metric_labels_hold_no_client_text(server: Served) -> None:
    label = "injected-label"
    server.http.get(f"/{label}")
    server.http.get(f"/v1/models/{label}")
    server.http.post("/v1/completions", json=body(server, max_tokens=1, user=label, session_id=label, metadata={label: label}))
    server.http.request(label.upper().replace("-", ""), "/health")
    assert label not in read_metrics(server).lower()


def test_nothing_is_unpickled() -> None:
    """Files are read as plain data: no module uses a loader that can run code from a file."""
    root = Path(__file__).parents[3]
    for folder in ("server", "drafters", "verify"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text()
            assert "import pickle" not in text and "allow_pickle=True" not in text, file
            loads = [line for line in text.splitlines() if "torch.load(" in line]
            assert all("weights_only=True" in line for line in loads), file  # draft heads are published in torch's format
