"""The server starts and answers without POSIX's modules, and where processes inherit no sockets, as on Windows."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.server.engine import program
from tests.servers import Served, serving, wait_until, worker_of

# Python runs this in every process of the server. Libraries, which know Linux, have their modules.
HIDDEN = """
import builtins, subprocess

original_import, original_start = builtins.__import__, subprocess.Popen.__init__

def find(name, globals=None, *rest, **options):
    if name in ("fcntl", "resource") and (globals or {}).get("__name__", "").startswith("outrider."):
        raise ImportError(f"No module named {name}")
    return original_import(name, globals, *rest, **options)

def start(self, *arguments, **options):
    if options.get("pass_fds"):
        raise ValueError("pass_fds not supported on Windows.")
    original_start(self, *arguments, **options)

builtins.__import__, subprocess.Popen.__init__ = find, start
"""


@pytest.fixture(scope="module")
def without_posix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDDEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        with serving("--sessions.folder", str(folder / "sessions")) as server:
            yield server


def test_it_answers_and_follows_a_grammar(without_posix: Served) -> None:
    """The worker and the validator of grammars are programs of their own."""
    body = {"model": without_posix.model, "prompt": "def add(", "max_tokens": 8, "regex": "[a-z]{3}"}
    response = without_posix.http.post("/v1/completions", json=body)
    assert response.status_code == 200 and len(response.json()["choices"][0]["text"]) == 3


def test_a_worker_that_ends_is_replaced(without_posix: Served) -> None:
    before = worker_of(without_posix)
    os.kill(before, 9)
    wait_until(lambda: not Path(f"/proc/{before}").exists() and without_posix.http.get("/ready").status_code == 200, 120)
    assert worker_of(without_posix) != before
    answer = without_posix.client.completions.create(model=without_posix.model, prompt="def add(", max_tokens=4)
    assert answer.choices[0].text


def test_nobody_else_becomes_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever connects first without the secret is sent away."""
    (tmp_path / "echo.py").write_text(
        "from outrider.server.engine import program\n"
        "program.is_posix = lambda: False\n"
        "def main(argument):\n"
        "    program.connected(argument).sendall(b'the program')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = socket.create_server
    strangers: list[socket.socket] = []

    def watched(*arguments: object, **options: object) -> socket.socket:
        listener = made(*arguments, **options)  # type: ignore[arg-type]
        strangers.append(socket.create_connection(("127.0.0.1", listener.getsockname()[1])))  # waits to be accepted
        strangers[-1].sendall(bytes(program.SECRET_BYTES))
        return listener

    monkeypatch.setattr(socket, "create_server", watched)
    process, end = program.start_with_port("echo")
    with end:
        assert program.received(end, 11) == b"the program"
    assert process.wait(10) == 0 and strangers[0].recv(1) == b""
    strangers[0].close()
