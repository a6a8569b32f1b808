"""Processes are found in /proc, and a server that ends before it is ready is an error."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest

from bench.http.process import children, find_worker, resident_mb, served_url, start_server, wait_until_ready
from bench.plan import BenchError


def test_a_worker_is_found_among_the_children() -> None:
    program = "input()  # outrider.server.worker.main"
    command = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}], stdin=0).wait()"
    parent = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
    try:
        assert parent.pid in children(os.getpid())
        while (worker := find_worker(parent.pid)) is None:
            assert parent.poll() is None
        assert worker in children(parent.pid)
        assert find_worker(worker) is None
    finally:
        parent.communicate(b"\n", timeout=30)


def test_memory_is_that_of_a_running_process() -> None:
    assert 1 < resident_mb(os.getpid()) < 100_000
    assert resident_mb(1 << 30) == 0.0


def test_a_server_that_exits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda url: httpx.Response(503))
    with subprocess.Popen([sys.executable, "-c", ""], text=True) as process:
        process.wait(30)
        with pytest.raises(BenchError, match="ended before"):
            wait_until_ready("http://server", process)


def test_the_address_may_follow_lines_of_the_log() -> None:
    lines = [
        "WARNING outrider: no tools at http://x/v1\n",
        "outrider: serving m at http://127.0.0.1:5/v1 (loading the model)\n",
    ]
    assert served_url(lines) == served_url(lines[1:]) == "http://127.0.0.1:5"
    with pytest.raises(BenchError, match="did not start: the reason"):
        served_url(["a log line\n", "the reason\n"])


def test_a_wrong_flag_is_reported() -> None:
    with pytest.raises(BenchError, match=r"did not start: .*--prot"), start_server(["--prot", "1"]):
        pass
