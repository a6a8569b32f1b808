"""A server with TLS answers over it, takes renewed files into use, and says in one sentence which file is wrong."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from outrider import models
from outrider.server.http.tls import load
from outrider.server.settings import SettingsError
from outrider.server.terminal.client import ChatError, Client
from tests.server.fakes import FakeEngine
from tests.server.http.test_server import EndlessEngine, serving_at

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
