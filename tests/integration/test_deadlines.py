"""Time limits: in the queue and for the whole answer; and pages that the owner lets ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.conftest import Served, serving
from tests.integration.test_server import body, complete

FOREVER: dict[str, Any] = {"temperature": 1.5, "max_tokens": 1900, "n": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def own() -> Iterator[Served]:
    limits = {"max_active": "1", "queue_seconds": "0.5", "request_seconds": "3"}
    words = [word for name, value in limits.items() for word in (f"--scheduling.{name}", value)]
    with serving("--model.dtype", "float32", "--server.cors_origins", '["https://page.example"]', *words) as server:
        yield server


def test_an_answer_that_takes_too_long_ends_with_an_error(own: Served) -> None:
    whole = own.http.post("/v1/completions", json=body(own, **FOREVER))
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "deadline_exceeded")
    assert "within 3 s" in whole.json()["error"]["message"]
    with own.http.stream("POST", "/v1/completions", json=body(own, stream=True, **FOREVER)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1][6:])["error"]["code"] == "deadline_exceeded"
    assert complete(own, max_tokens=3)["choices"]  # and its turn is free again


def test_who_has_waited_too_long_is_told_to_come_again(own: Served) -> None:
    with ThreadPoolExecutor() as pool:
        long = pool.submit(own.http.post, "/v1/completions", json=body(own, **FOREVER))
        while "outrider_requests_running 1.0" not in own.http.get("/metrics").text:
            pass
        waited = own.http.post("/v1/completions", json=body(own, max_tokens=1))
        assert (waited.status_code, waited.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert int(waited.headers["Retry-After"]) >= 1
        long.result(30)
    refused = 'outrider_rejected_requests_total{reason="deadline"}'
    assert any(line.startswith(refused) and float(line.split()[1]) >= 3 for line in own.http.get("/metrics").text.splitlines())


def test_a_page_that_the_owner_names_may_ask(own: Served) -> None:
    def allowed(origin: str) -> str | None:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        found: str | None = own.http.options("/v1/completions", headers=asked).headers.get("access-control-allow-origin")
        return found

    assert allowed("https://page.example") == "https://page.example"
    assert allowed("https://evil.example") is None
