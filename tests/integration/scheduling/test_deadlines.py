"""Time limits of the queue and of a request; allowed CORS origins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.requests import ENDLESS, body, complete
from tests.servers import Served, serving, wait_for_metric

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    limits = {"max_active": "1", "queue_seconds": "0.5", "request_seconds": "2"}
    words = [word for name, value in limits.items() for word in (f"--scheduling.{name}", value)]
    with serving("--model.dtype", "float32", "--server.cors_origins", '["https://page.example"]', *words) as server:
        yield server


def test_an_answer_over_its_time_limit_ends_with_an_error(server: Served) -> None:
    response = server.http.post("/v1/completions", json=body(server, **ENDLESS))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "deadline_exceeded")
    assert "within 2 s" in response.json()["error"]["message"]
    with server.http.stream("POST", "/v1/completions", json=body(server, stream=True, **ENDLESS)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1][6:])["error"]["code"] == "deadline_exceeded"
    assert complete(server, max_tokens=3)["choices"]  # its slot is free again


def test_a_request_that_waits_too_long_is_refused(server: Served) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.http.post, "/v1/completions", json=body(server, **ENDLESS))
        wait_for_metric(server, "outrider_requests_running 1.0")
        waited = server.http.post("/v1/completions", json=body(server, max_tokens=1))
        assert (waited.status_code, waited.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert int(waited.headers["Retry-After"]) >= 1
        running.result(30)
    refused = 'outrider_rejected_requests_total{reason="deadline"}'
    assert any(
        line.startswith(refused) and float(line.split()[1]) >= 3 for line in server.http.get("/metrics").text.splitlines()
    )
