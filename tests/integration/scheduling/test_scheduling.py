"""Concurrent requests, disconnects and sessions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.requests import ENDLESS, PROMPT, body, complete, streaming, text
from tests.servers import Served, wait_for_metric


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prefix_is_cached_with_and_without_a_session_id(served: Served) -> None:
    for name, session in (("a", {}), ("b", {"session_id": "s1"})):
        long_prompt = f"def {name}():\n" + PROMPT * 20
        first = complete(served, prompt=long_prompt, max_tokens=4, **session)
        assert cached_tokens(first) == 0
        second = complete(served, prompt=long_prompt + text(first) + "\n", max_tokens=4, **session)
        assert cached_tokens(second) > 0.8 * second["usage"]["prompt_tokens"]
    header = served.http.post("/v1/completions", json=body(served, prompt=long_prompt), headers={"X-Session-Id": "s1"})
    assert cached_tokens(header.json()) > 0


def test_a_disconnect_frees_the_worker(served: Served) -> None:
    with streaming(served, **ENDLESS):
        pass
    with pytest.raises(httpx.ReadTimeout):  # a client that gives up on a JSON answer
        served.http.post("/v1/completions", json=body(served, **ENDLESS), timeout=0.3)
    wait_for_metric(served, "outrider_requests_running 0.0")  # in far less time than the two answers take
    assert text(complete(served, max_tokens=2))
