"""Attacks on a server with keys: forged headers, giant requests, hostile patterns, injected names."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.requests import body
from tests.servers import CAROL, Served, read_metrics


@pytest.fixture(scope="module")
def server(guarded: Served) -> Iterator[Served]:
    """Clients with a request quota."""
    with guarded.login(CAROL) as server:
        yield server


def raw(server: Served, content: bytes) -> str:
    """The first line of the server's answer to raw bytes."""
    parts = urlsplit(server.url)
    assert parts.hostname and parts.port
    with socket.create_connection((parts.hostname, parts.port), 10) as connection:
        connection.sendall(content)
        return connection.makefile("rb").readline().decode("latin-1").strip()


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/models/", "/health/../v1/models", "/V1/models", "/v1/models%00", "/v1;/models"]
)
def test_no_spelling_of_a_path_bypasses_the_key(server: Served, path: str) -> None:
    line = raw(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert line.split(" ")[1] in ("400", "401", "404"), line


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
    for folder in ("server", "drafters", "engines", "verify"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text()
            assert "import pickle" not in text and "allow_pickle=True" not in text, file
            loads = [line for line in text.splitlines() if "torch.load(" in line]
            assert all("weights_only=True" in line for line in loads), file  # draft heads are published in torch's format
