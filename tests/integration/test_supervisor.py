"""A worker that is killed or stands still is replaced: what it was at ends with an error, what waited is served."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Served, serving

STALL_SECONDS = 3


@pytest.fixture(scope="module")
def own() -> Iterator[Served]:
    with serving(
        "--model.dtype", "float32", "--scheduling.stall_seconds", str(STALL_SECONDS), "--scheduling.max_active", "1"
    ) as server:
        yield server


def worker_of(server: Served) -> int:
    """The process id of the worker: of the server's children, the one that was started to run it."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    for child in (int(child) for children in threads for child in children.read_text().split()):
        if b"server.worker.main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("no worker")


def ask(server: Served, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0} | fields
    return server.http.post("/v1/completions", json=body)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced(own: Served, how: signal.Signals) -> None:
    before = ask(own).json()["choices"][0]["text"]
    worker = worker_of(own)
    forever: dict[str, Any] = {"temperature": 1.5, "max_tokens": 1900, "n": 16, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        stream = {"model": own.model, "prompt": "x", "stream": True} | forever
        with own.http.stream("POST", "/v1/completions", json=stream) as response:
            lines = response.iter_lines()
            next(lines)
            waiting = pool.submit(ask, own)
            os.kill(worker, how)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-1] and "lost" in rest[-1]
        answered = waiting.result(60)
    assert answered.status_code == 200
    assert answered.json()["choices"][0]["text"] == before
    assert worker_of(own) != worker
    assert own.http.get("/ready").json() == {"status": "ready"}


def test_a_response_of_a_lost_worker_fails(own: Served) -> None:
    stream = own.client.responses.create(
        model=own.model, input="x", temperature=1.5, stream=True, extra_body={"ignore_eos": True}
    )
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and sum(e.type == event.type for e in events) == 1:
            os.kill(worker_of(own), signal.SIGKILL)
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None and "lost" in last.response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_whole_answer_of_a_lost_worker_is_a_503(own: Served) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, own, temperature=1.5, max_tokens=1900, n=16)
        while "outrider_requests_running 1.0" not in own.http.get("/metrics").text:
            pass
        os.kill(worker_of(own), signal.SIGKILL)
        response = waiting.result(60)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_unavailable"
    assert int(response.headers["Retry-After"]) > 0
    assert "outrider_worker_restarts_total" in own.http.get("/metrics").text
