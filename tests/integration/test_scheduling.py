"""Concurrent requests, disconnects and sessions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.requests import ENDLESS, PROMPT, body, complete, streaming, text
from tests.servers import Served, wait_for_metric


def test_a_prefix_is_cached_only_with_a_session_id(served: Served) -> None:
    long_prompt = PROMPT * 20
    for session in ({}, {"session_id": "s1"}):
        first = complete(served, prompt=long_prompt, max_tokens=4, **session)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        second = complete(served, prompt=long_prompt + text(first) + "\n", max_tokens=4, **session)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0.8 * second["usage"]["prompt_tokens"] if session else cached == 0
    header = served.http.post("/v1/completions", json=body(served, prompt=long_prompt), headers={"X-Session-Id": "s1"})
    assert header.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_disconnect_frees_the_worker(served: Served) -> None:
    with streaming(served, **ENDLESS):
        pass
    with pytest.raises(httpx.ReadTimeout):  # a client that gives up on a JSON answer
        served.http.post("/v1/completions", json=body(served, **ENDLESS), timeout=0.3)
    wait_for_metric(served, "outrider_requests_running 0.0")  # in far less time than the two answers take
    assert text(complete(served, max_tokens=2))


def test_concurrent_requests_are_all_answered(served: Served) -> None:
    single = text(complete(served, max_tokens=30))
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: text(complete(served, max_tokens=30)), range(8)))
    assert texts == [single] * 8


def test_a_long_answer_does_not_starve_a_short_one(served: Served) -> None:
    """Their steps interleave."""
    with streaming(served, **ENDLESS):
        assert complete(served, max_tokens=10)["choices"][0]["finish_reason"] == "length"
        assert "outrider_requests_running 1.0" in served.http.get("/metrics").text  # the long answer is still running
