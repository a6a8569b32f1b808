"""A UNIX socket has the set mode, replaces one that nobody listens on, and goes with its server."""

import os
import socket
import stat
from pathlib import Path

import pytest

from outrider import models
from outrider.server.serve import listening_at
from outrider.server.terminal.client import Client, NoServer
from tests.server.fakes import FakeEngine
from tests.server.http.test_server import serving_at


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
        with (
            pytest.raises(OSError, match=r"a running server listens there\); choose another --host"),
            listening_at(path, 0),
        ):
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
