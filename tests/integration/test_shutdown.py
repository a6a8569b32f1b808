"""SIGTERM: what is being answered is answered, what takes too long ends with an error, a second signal ends at once."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Served, serving

FOREVER: dict[str, Any] = {"prompt": "x", "temperature": 1.5, "max_tokens": 1900, "n": 16, "ignore_eos": True, "stream": True}


@contextmanager
def streaming(server: Served, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with server.http.stream("POST", "/v1/completions", json={"model": server.model} | fields) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_a_drain_answers_what_is_there_and_takes_nothing_more() -> None:
    with serving("--model.dtype", "float32", "--server.drain_seconds", "60") as server:
        fields = {"prompt": "def f(", "max_tokens": 700, "temperature": 1.0, "seed": 3, "ignore_eos": True, "stream": True}
        with streaming(server, **fields) as lines:
            server.process.send_signal(signal.SIGTERM)
            refused = False
            deadline = time.monotonic() + 10
            while not refused and time.monotonic() < deadline:
                try:
                    refused = httpx.get(f"{server.url}/ready").status_code == 503
                except httpx.TransportError:
                    refused = True
            assert refused
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        server.process.wait(20)


def test_at_the_deadline_what_is_left_ends_with_an_error() -> None:
    with serving("--model.dtype", "float32", "--server.drain_seconds", "0.5", "--scheduling.max_active", "1") as server:
        waited: list[httpx.Response] = []

        def wait() -> None:
            waited.append(server.http.post("/v1/completions", json={"model": server.model, "prompt": "y"}))

        with streaming(server, **FOREVER) as lines:
            waiting = threading.Thread(target=wait)
            waiting.start()
            while "outrider_requests_waiting 1.0" not in httpx.get(f"{server.url}/metrics").text:
                pass
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"
        waiting.join(20)
        assert waited[0].status_code == 503
        assert "Retry-After" in waited[0].headers
        server.process.wait(20)
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    with serving("--model.dtype", "float32", "--server.drain_seconds", "600") as server:
        with pytest.raises(httpx.TransportError), streaming(server, **FOREVER) as lines:
            server.process.send_signal(number)
            time.sleep(0.5)  # the first one is taken in
            assert server.process.poll() is None
            server.process.send_signal(number)
            for _ in lines:
                pass
        server.process.wait(20)
