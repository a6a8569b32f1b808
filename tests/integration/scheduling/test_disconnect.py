"""A client that leaves."""

from __future__ import annotations

import httpx
import pytest

from tests.requests import ENDLESS, body, complete, streaming, text
from tests.servers import Served, wait_for_metric


def test_a_disconnect_frees_the_worker(served: Served) -> None:
    with streaming(served, **ENDLESS):
        pass
    with pytest.raises(httpx.ReadTimeout):  # a client that gives up on a JSON answer
        served.http.post("/v1/completions", json=body(served, **ENDLESS), timeout=0.3)
    wait_for_metric(served, "outrider_requests_running 0.0")  # in far less time than the two answers take
    assert text(complete(served, max_tokens=2))
