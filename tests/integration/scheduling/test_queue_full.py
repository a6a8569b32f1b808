"""A full queue: a request is refused with a 429, and the official client retries until it is served."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.requests import ENDLESS, MESSAGES, complete, streaming
from tests.servers import Served, wait_for_metric, wait_until

REFUSED = 'outrider_rejected_requests_total{reason="queue_full"} '


def refusals(server: Served) -> float:
    """The number of requests refused because the queue was full."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(REFUSED)) for line in lines if line.startswith(REFUSED))


@pytest.mark.slow
def test_the_official_client_retries(crowded: Served) -> None:
    common: Any = {"model": crowded.model, "messages": MESSAGES, "max_tokens": 2}
    create: Callable[..., Any] = crowded.client.with_options(max_retries=60).chat.completions.create
    with ThreadPoolExecutor() as pool:
        with streaming(crowded, **ENDLESS) as running:
            queued = pool.submit(complete, crowded, max_tokens=2)
            wait_for_metric(crowded, "outrider_requests_waiting 1.0")
            with pytest.raises(openai.RateLimitError) as raised:
                crowded.client.with_options(max_retries=0).chat.completions.create(**common)
            assert int(raised.value.response.headers["Retry-After"]) > 0
            assert raised.value.code == "queue_full"
            stream = crowded.http.post("/v1/completions", json={"model": crowded.model, "prompt": "x", "stream": True})
            assert stream.status_code == 429  # an HTTP status, not an event
            assert stream.json()["error"]["code"] == "queue_full"
            before = refusals(crowded)
            assert before >= 2
            retried = pool.submit(create, **common)
            wait_until(lambda: refusals(crowded) > before)
            assert next(line for line in running if line).startswith("data: {")  # the running request continues
        assert queued.result(60)["choices"]
        assert retried.result(60).choices[0].message.content is not None
