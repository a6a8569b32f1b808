"""Processes are found in /proc, and a server that ends before it is ready is an error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bench.http.process import ServerProcess, children, find_worker, resident_mb, start, start_server
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
    assert 1 < resident_mb(os.getpid()) <= resident_mb(os.getpid(), "VmHWM") < 100_000
    assert resident_mb(1 << 30) == 0.0


def test_a_server_that_ends_is_reported_with_its_last_line() -> None:
    failing = start(["json.tool"], "/health")  # does not know --port
    with pytest.raises(BenchError, match=r"json\.tool did not start: .*error: argument infile"), failing:
        pass


def test_a_wrong_flag_is_reported() -> None:
    with pytest.raises(BenchError, match=r"did not start: .*--prot"), start_server(["--prot", "1"]):
        pass


def test_a_server_runs_only_while_it_is_asked() -> None:
    with start(["uvicorn", "fastapi:FastAPI", "--factory"], "/docs", paused=True) as server:
        for _ in range(2):
            with server.running() as client:
                assert client.get("/docs").status_code == 200
            with pytest.raises(httpx.TimeoutException):
                server.client.get("/docs", timeout=0.1)
        assert any("/docs" in line for line in server.log)
    assert server.process.wait(0) is not None


def test_polling_ends_with_the_first_success() -> None:
    statuses = [503, 503, 200, 500]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(statuses.pop(0))

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
        server = ServerProcess("server", "http://server", client, process, Path("/dev/null"), time.perf_counter())
        assert 0 < server.seconds_until("/ready", 0.001) < 60
        process.communicate(b"\n")
        with pytest.raises(BenchError, match="server did not start: it printed nothing"):
            server.seconds_until("/ready")
    assert statuses == [500]
