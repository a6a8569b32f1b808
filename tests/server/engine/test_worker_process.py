"""Settings are sent without the keys; a process reports its exit code; the worker ends with its front end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.server.engine.program import command
from outrider.server.engine.worker_process import WorkerProcess, decode_settings, encode_settings
from outrider.server.settings import load_settings


def test_settings_arrive_with_masked_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        None,
        {
            "auth.keys": {"one": {"key": "a-long-secret", "datastores": ["some/folder"]}},
            "speculation.retrieval.datastores": ["a", "b"],
            "scheduling.queue_seconds": "inf",
        },
    )
    plain = encode_settings(settings)
    assert "a-long-secret" not in str(plain)
    monkeypatch.setenv("OUTRIDER_SERVER__PORT", "9")
    decoded = decode_settings(plain)
    assert decoded.auth.keys["one"].datastores == ("some/folder",)
    assert decoded.model_copy(update={"auth": settings.auth}) == settings


def test_the_worker_inherits_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_AUTH__KEYS", '{"one": "a-long-secret"}')
    worker = WorkerProcess(load_settings())
    try:
        inherited = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
        assert b"a-long-secret" not in inherited and b"PATH=" in inherited
    finally:
        worker.close()


def test_the_child_process_gets_the_module_search_path() -> None:
    program = command("tests.server.engine.echo", "hello")
    done = subprocess.run(program, capture_output=True, text=True, cwd="/")
    assert done.stdout == f"hello {len(sys.path)}\n", done.stderr


def test_a_process_that_cannot_be_started_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def make_pair() -> tuple[socket.socket, socket.socket]:
        made.extend(pair())
        return made[0], made[1]

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    pair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", make_pair)
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(OSError, match="Too many open files"):
        WorkerProcess(load_settings())
    assert [each.fileno() for each in made] == [-1, -1]


def test_a_killed_process_reports_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    process = WorkerProcess(load_settings())
    assert process.alive and process.exit_code is None
    process.kill()
    process.wait(10)
    assert process.exit_code == -signal.SIGKILL
    process.close()


def test_the_worker_ends_with_its_front_end_and_ignores_ctrl_c() -> None:
    """Also while it imports and loads."""
    process = WorkerProcess(load_settings())
    os.kill(process._process.pid, 0)
    time.sleep(0.5)  # until the interpreter has started
    process._process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.alive
    process.socket.close()  # as if the front end had died
    process.wait(20)
    assert process.exit_code == 1
