"""Time limits of the queue and of a request."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.requests import ENDLESS, body, complete
from tests.servers import read_metrics, serving, wait_for_metric


@pytest.mark.slow
def test_requests_that_wait_or_run_too_long_end_with_an_error() -> None:
    limits = {"max_active": "1", "queue_seconds": "0.5", "request_seconds": "2"}
    flags = [word for name, value in limits.items() for word in (f"--scheduling.{name}", value)]
    with serving("--model.dtype", "float32", *flags) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(server.http.post, "/v1/completions", json=body(server, **ENDLESS))
        wait_for_metric(server, "outrider_requests_running 1.0")
        waited = server.http.post("/v1/completions", json=body(server, max_tokens=1))
        for answer, limit in ((waited, "within 0.5 s"), (running.result(30), "within 2 s")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_exceeded")
            assert limit in answer.json()["error"]["message"]
        assert int(waited.headers["Retry-After"]) >= 1
        refused = re.search(r'outrider_rejected_requests_total{reason="deadline"} (\S+)', read_metrics(server))
        assert refused and float(refused[1]) >= 2
        assert complete(server, max_tokens=3)["choices"]  # the slot is free again
