"""Processes are found in /proc, and a server that ends before it is ready is an error."""

import os
import subprocess
import sys

import pytest

from bench.http.process import children, find_worker, start
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


def test_a_server_that_ends_is_reported_with_its_last_line() -> None:
    failing = start(["json.tool"], "/health")  # does not know --port
    with pytest.raises(BenchError, match=r"json\.tool did not start: .*error: argument infile"), failing:
        pass


def test_a_server_answers_and_ends() -> None:
    with start(["uvicorn", "fastapi:FastAPI", "--factory"], "/docs") as server:
        assert server.client.get("/docs").status_code == 200
        assert any("/docs" in line for line in server.log)
    assert server.process.wait(0) is not None
