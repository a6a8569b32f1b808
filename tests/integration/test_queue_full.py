"""A full queue: the official client is told to come again, and does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.integration.conftest import Served, serving
from tests.integration.test_server import MESSAGES


@pytest.fixture(scope="module")
def own() -> Iterator[Served]:
    with serving("--model.dtype", "float32", "--scheduling.max_waiting", "0", "--scheduling.max_active", "1") as server:
        yield server


def test_the_client_comes_again(own: Served) -> None:
    common: Any = {"model": own.model, "messages": MESSAGES}
    with ThreadPoolExecutor() as pool:
        create: Any = own.client.chat.completions.create
        long = pool.submit(create, **common, temperature=1.5, n=3, max_tokens=900, extra_body={"ignore_eos": True})
        while "outrider_requests_running 1.0" not in own.http.get("/metrics").text:
            pass
        with pytest.raises(openai.RateLimitError) as raised:
            own.client.with_options(max_retries=0).chat.completions.create(**common, max_tokens=2)
        assert int(raised.value.response.headers["Retry-After"]) > 0
        assert raised.value.code == "queue_full"
        stream = own.http.post("/v1/completions", json={"model": own.model, "prompt": "x", "stream": True})
        assert stream.status_code == 429  # a status of its own, not an event
        assert stream.json()["error"]["code"] == "queue_full"
        later = own.client.with_options(max_retries=60).chat.completions.create(**common, max_tokens=2)
        assert later.choices[0].message.content is not None
        assert len(long.result(60).choices) == 3
    assert 'outrider_rejected_requests_total{reason="queue_full"}' in own.http.get("/metrics").text
