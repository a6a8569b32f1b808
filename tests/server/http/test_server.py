"""The server's connections: clients that leave or stand still, proxies, UNIX sockets, and TLS with renewed files."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from outrider import models
from outrider.server.engine.messages import Request, TokenEvent
from outrider.server.http import protocol
from outrider.server.http.server import address, new_config
from outrider.server.http.tls import load
from outrider.server.serve import listen_as_set, listening_at
from outrider.server.settings import SettingsError, load_settings
from outrider.server.terminal.client import ChatError, Client, NoServer
from tests.server.fakes import FakeEngine, app_with
from tests.server.http.test_protocol import GET, UPLOAD
from tests.servers import wait_until

SOCKET_SECONDS = 60.0  # a test fails if the server does not act within this time


class EndlessEngine(FakeEngine):
    """Answers with an endless text, and counts its tokens."""

    tokens = 0
    pause_seconds = 0.0  # before each
    running = closed = False

    async def generate(
        self, request: Request, arrived: float | None = None, admitted: bool = False
    ) -> AsyncGenerator[TokenEvent | None, None]:
        self.running = True
        try:
            while True:
                await asyncio.sleep(self.pause_seconds)
                self.tokens += 1
                yield self._event(request, 0, 0, "x" * 100)
        finally:
            self.closed = True


@contextlib.contextmanager
def serving(engine: FakeEngine, **settings: Any) -> Iterator[int]:
    """A server in a thread. Yields its port."""
    with serving_at(engine, **settings) as url:
        yield int(url.rpartition(":")[2])


@contextlib.contextmanager
def serving_at(engine: FakeEngine, **settings: Any) -> Iterator[str]:
    """A server in a thread. Yields its address."""
    app = app_with(engine, **settings)
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    loaded = load_settings(None, {"server.port": 0, **flags})
    with listen_as_set(loaded.server) as listener:
        server = uvicorn.Server(new_config(app, loaded, app.state.metrics, 1.0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        url = address(listener, loaded.server)
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), SOCKET_SECONDS)


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
    return bytes(received)


def completion(**fields: Any) -> bytes:
    body = json.dumps({"model": "outrider-embedded", "prompt": "x", **fields}).encode()
    return UPLOAD.replace(b"1000", str(len(body)).encode()) + body


def test_a_stream_whose_reader_stands_still_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.2)
    engine = EndlessEngine()
    with serving(engine) as port, connect(port) as connection:
        connection.sendall(completion(stream=True))
        wait_until(lambda: engine.closed, SOCKET_SECONDS)
    assert engine.tokens < 5000  # more than ten times as many without TCP_NOTSENT_LOWAT


def test_a_disconnect_behind_a_pipelined_request_cancels_the_answer() -> None:
    engine = EndlessEngine()
    with serving(engine) as port:
        with connect(port) as connection:
            connection.sendall(completion(stream=True) + GET)
            wait_until(lambda: engine.running, SOCKET_SECONDS)
        wait_until(lambda: engine.closed, SOCKET_SECONDS)
    assert engine.closed


class SilentEngine(EndlessEngine):
    """Answers nothing, as while a request waits in the queue."""

    pause_seconds = 3600.0


def statuses(port: int) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics").text):
        for sample in family.samples:
            if sample.name == "outrider_requests_total" and sample.value:
                found.setdefault(sample.labels["endpoint"], set()).add(sample.labels["status"])
    return found


def is_counted(port: int, path: str) -> bool:
    return path in statuses(port)


def test_clients_that_leave_before_their_answer_count_as_closed() -> None:
    """In the middle of a body, of any endpoint, and while a request waits."""
    app = app_with(FakeEngine("a"), corpora__total_bytes=1_000_000)
    methods = {path: each.get("post", {}) for path, each in app.openapi()["paths"].items()}
    paths = [path for path, post in methods.items() if "requestBody" in post]
    assert len(paths) > 10
    engine = SilentEngine()
    with serving(engine, corpora__total_bytes=1_000_000) as port:
        for path in paths:
            with connect(port) as connection:
                connection.sendall(UPLOAD.replace(b"/v1/completions", path.encode()) + b'{"a')
            wait_until(partial(is_counted, port, path), SOCKET_SECONDS)
        with connect(port) as connection:
            connection.sendall(completion())
            wait_until(lambda: engine.running, SOCKET_SECONDS)
        wait_until(lambda: engine.closed, SOCKET_SECONDS)
        assert {status for path in paths for status in statuses(port)[path]} == {"499"}


@pytest.mark.parametrize(("proxies", "owner"), [((), "127.0.0.1"), (("127.0.0.1",), "10.9.8.7"), (("10.0.0.1",), "127.0.0.1")])
def test_a_forwarded_address_counts_only_from_a_trusted_proxy(proxies: tuple[str, ...], owner: str) -> None:
    """Without keys, sessions belong to addresses, which any client could write into the header."""
    engine = FakeEngine("a")
    with serving(engine, server__trusted_proxies=proxies) as port:
        body = {"model": models.NAME, "prompt": "x", "session_id": "key"}
        headers = {"X-Forwarded-For": "10.9.8.7"}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert [request.session for request in engine.requests] == [f"{owner} key"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(fields: dict[str, Any]) -> None:
    with serving(FakeEngine("ab")) as port, connect(port) as connection:
        connection.sendall(completion(**fields).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0].endswith(b" 200 ok") and b"connection: close" in lines and b"transfer-encoding: chunked" not in lines
    if fields:
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    else:
        assert b"content-length: %d" % len(body) in lines and json.loads(body)["choices"]


def test_a_client_talks_to_a_server_on_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "outrider.sock"
    with serving_at(FakeEngine("a"), server__host=f"unix:{path},mode=660") as url:
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert Client(url).cards() and Client(f"unix://{path}/v1").cards()
        body = {"model": models.NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert list(Client(url).stream(body))
    assert not path.exists()
    with pytest.raises(NoServer, match=f"No server answers at unix:{path}"):
        Client(url).version()


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "outrider.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with listening_at(path, 0o600):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(OSError, match=r"a running server listens there\); choose another --host"), listening_at(path, 0):
            pass
        os.unlink(path)
        with listening_at(path, 0o600):
            pass


def test_the_socket_of_a_successor_stays(tmp_path: Path) -> None:
    path, other = tmp_path / "outrider.sock", tmp_path / "other.sock"
    with listening_at(other, 0o600):
        with listening_at(path, 0o600):
            os.replace(other, path)
        assert path.exists()


def test_paths_that_cannot_be_sockets_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = {"file": "there is a file that is no socket", "x" * 120: "path too long", "no/folder": "No such file or directory"}
    for name, reason in wrong.items():
        with (
            pytest.raises(OSError, match=rf"Cannot listen on the UNIX socket .*{reason}"),
            listening_at(tmp_path / name, 0o600),
        ):
            pass
    assert (tmp_path / "file").exists()


NEW = ("openssl", "req", "-x509", "-nodes", "-days", "2", "-addext", "subjectAltName=IP:127.0.0.1")
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pairs `one` and `two`, a key of another algorithm, and an encrypted key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        run(*NEW, *EC, "-subj", f"/CN={name}", "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem")
    run("openssl", "genpkey", "-algorithm", "ed25519", "-out", f"{folder}/ed25519.key")
    run("openssl", "pkey", "-in", f"{folder}/one.key", "-aes128", "-passout", "pass:secret", "-out", f"{folder}/encrypted.key")
    return folder


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def get(url: str, certificate: Path) -> int:
    """The status of an answer; raises httpx.ConnectError if the server has another certificate."""
    return httpx.get(f"{url}/health", verify=ssl.create_default_context(cafile=str(certificate))).status_code


def test_new_connections_get_the_renewed_certificate_and_open_ones_stay(files: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(files / "one.pem", certificate)
    shutil.copy(files / "one.key", key)
    engine = EndlessEngine("")
    with serving_at(engine, server__tls_certificate=str(certificate), server__tls_key=str(key)) as url:
        assert url.startswith("https://") and get(url, files / "one.pem") == 200
        context = ssl.create_default_context(cafile=str(files / "one.pem"))
        body = {"model": models.NAME, "prompt": "a", "stream": True, "max_tokens": 100}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, verify=context) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            shutil.copy(files / "two.pem", certificate)
            assert get(url, files / "one.pem") == 200  # the key does not fit yet
            shutil.copy(files / "two.key", key)
            assert get(url, files / "two.pem") == 200
            with pytest.raises(httpx.ConnectError):
                get(url, files / "one.pem")
            assert next(lines) is not None


def test_clients_are_told_what_keeps_them_from_a_server_with_tls(files: Path) -> None:
    settings = {"server__tls_certificate": str(files / "one.pem"), "server__tls_key": str(files / "one.key")}
    with serving_at(FakeEngine("a"), **settings) as url:
        with pytest.raises(ChatError, match=r"is not trusted: self-signed certificate; .* SSL_CERT_FILE"):
            Client(url).version()
        with pytest.raises(ChatError, match="whether its address begins with https"):
            Client(url.replace("https", "http")).version()
    with serving_at(FakeEngine("a")) as url, pytest.raises(ChatError, match="does not speak TLS; give an address with http://"):
        Client(url.replace("http", "https")).version()


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("none.pem", "one.key", "tls_certificate names .*none.pem, which cannot be read: No such file"),
        ("one.pem", "none.key", "tls_key names .*none.key, which cannot be read: No such file"),
        ("one.key", "one.key", "tls_certificate names .*one.key, which has no line with BEGIN CERTIFICATE"),
        ("one.pem", "one.pem", "tls_key names .*one.pem, which has no line with PRIVATE KEY"),
        ("one.pem", "two.key", "two.key does not belong to the certificate .*one.pem"),
        ("one.pem", "ed25519.key", "ed25519.key does not belong to the certificate .*one.pem"),
        ("one.pem", "encrypted.key", "encrypted.key is encrypted; write it without a password"),
    ],
)
def test_wrong_files_are_one_sentence(files: Path, certificate: str, key: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as raised:
        load(files / certificate, files / key)
    assert "\n" not in str(raised.value)
