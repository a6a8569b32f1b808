"""SIGTERM: running requests are finished, late ones end with an error, and a second signal ends all of them at once."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.requests import ENDLESS, body, streaming
from tests.servers import Served, serving, wait_for_metric, wait_until

WAIT_SECONDS = 20


def not_ready(server: Served) -> bool:
    """Whether the server refuses new requests."""
    try:
        return httpx.get(f"{server.url}/ready").status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.slow
def test_a_drain_finishes_running_requests_and_refuses_new_ones() -> None:
    with serving("--model.dtype", "float32", "--server.drain_seconds", "60") as server:
        with streaming(server, max_tokens=400, temperature=1.0, seed=3, ignore_eos=True) as lines:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not_ready(server), 10)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        server.process.wait(WAIT_SECONDS)


@pytest.mark.slow
def test_at_the_drain_deadline_the_remaining_requests_end_with_an_error() -> None:
    with (
        serving("--model.dtype", "float32", "--server.drain_seconds", "0.5", "--scheduling.max_active", "1") as server,
        ThreadPoolExecutor() as pool,
    ):
        with streaming(server, **ENDLESS) as lines:
            waiting = pool.submit(server.http.post, "/v1/completions", json=body(server))
            wait_for_metric(server, "outrider_requests_waiting 1.0")
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"
        refused = waiting.result(WAIT_SECONDS)
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        server.process.wait(WAIT_SECONDS)
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    with serving("--model.dtype", "float32", "--server.drain_seconds", "600") as server:
        with streaming(server, **ENDLESS) as lines:
            server.process.send_signal(number)
            time.sleep(0.5)  # the server handles the first signal
            assert server.process.poll() is None
            server.process.send_signal(number)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"
        server.process.wait(WAIT_SECONDS)
    assert not any("Traceback" in line for line in server.log)
