"""A worker that crashes or stalls is replaced: its running requests end with an error, queued ones are served."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.requests import ENDLESS
from tests.servers import Served, worker_of


def fetch(server: Served, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0} | fields
    return server.http.post("/v1/completions", json=body)


@pytest.mark.slow
@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced(crowded: Served, cause: signal.Signals) -> None:
    before = fetch(crowded).json()["choices"][0]["text"]
    worker = worker_of(crowded)
    with ThreadPoolExecutor() as pool:
        stream = {"model": crowded.model, "prompt": "x", "stream": True} | ENDLESS
        with crowded.http.stream("POST", "/v1/completions", json=stream) as response:
            lines = response.iter_lines()
            next(lines)
            waiting = pool.submit(fetch, crowded)
            os.kill(worker, cause)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-1] and "lost" in rest[-1]
        answered = waiting.result(60)
    assert answered.status_code == 200
    assert answered.json()["choices"][0]["text"] == before
    assert worker_of(crowded) != worker
    assert crowded.http.get("/ready").json() == {"status": "ready"}
