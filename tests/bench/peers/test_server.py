"""Servers of other programs: how they fail to start, and how their answers are read."""

from __future__ import annotations

import httpx
import pytest

from bench.peers.server import complete, start
from bench.plan import BenchError


def test_a_server_that_ends_is_reported_with_its_last_line() -> None:
    failing = start("some server", ["json.tool"], "/health", {})  # does not know --port
    with pytest.raises(BenchError, match=r"some server did not start: .*error: argument infile"), failing:
        pass


def test_an_answer_is_counted_by_its_usage_and_a_refusal_is_reported() -> None:
    body = {"usage": {"completion_tokens": 7}, "choices": [{"finish_reason": "stop"}]}
    answers = [httpx.Response(200, json=body), httpx.Response(200, json=body), httpx.Response(503, text="loading")]
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(lambda request: answers.pop(0)))
    answer = complete(client, {"prompt": "def f("})
    assert (answer.tokens, answer.ids) == (7, None)
    assert answer.seconds > 0
    assert complete(client, {"prompt": "def f("}, counts_end=False).tokens == 8
    with pytest.raises(BenchError, match="503: loading"):
        complete(client, {"prompt": "def f("})


def test_a_server_runs_only_while_it_is_asked() -> None:
    with start("FastAPI", ["uvicorn", "fastapi:FastAPI", "--factory"], "/docs", {}) as server:
        for _ in range(2):
            with server.running() as client:
                assert client.get("/docs").status_code == 200
            with pytest.raises(httpx.TimeoutException):
                server.client.get("/docs", timeout=0.1)
    assert server.process.wait(0) is not None
