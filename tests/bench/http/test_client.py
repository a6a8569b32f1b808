"""The measuring client: streams, errors, and values from /metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bench.http.client import complete, metric, stream

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handler))


def events(*chunks: dict[str, Any]) -> Handler:
    lines = [": comment", *(f"data: {json.dumps(chunk)}" for chunk in chunks), "data: [DONE]"]
    return lambda request: httpx.Response(200, text="\n\n".join(lines) + "\n\n")


def tokens(*ids: int) -> dict[str, Any]:
    return {"choices": [{"token_ids": list(ids)}]}


def test_a_stream_is_timed_by_packet() -> None:
    outcome = asyncio.run(stream(client(events(tokens(1, 2), tokens(3), {"choices": []})), {}))
    assert outcome.answered
    assert outcome.tokens == [1, 2, 3]
    assert len(outcome.gaps) == 2
    assert 0 < outcome.first_token <= outcome.seconds


def test_a_client_disconnects_after_some_packets() -> None:
    outcome = asyncio.run(stream(client(events(*(tokens(number) for number in range(9)))), {}, disconnect_after=2))
    assert outcome.tokens == [0, 1]


def test_an_error_in_the_stream_is_recorded() -> None:
    outcome = asyncio.run(stream(client(events(tokens(1), {"error": {"message": "the worker was replaced"}})), {}))
    assert (outcome.status, outcome.error, outcome.answered) == (200, "the worker was replaced", False)


@pytest.mark.parametrize("send", [stream, complete])
def test_refusals_and_lost_connections_are_outcomes(send: Callable[..., Any]) -> None:
    refused = asyncio.run(send(client(lambda request: httpx.Response(429, json={})), {}))
    assert (refused.status, refused.answered) == (429, False)

    def lose(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    lost = asyncio.run(send(client(lose), {}))
    assert (lost.status, lost.error, lost.answered) == (0, "ConnectError", False)


def test_a_metric_is_summed_over_its_labels() -> None:
    text = 'queue_waiting{kind="a"} 2.0\nqueue_waiting{kind="b"} 3.0\nqueue_waiting_total 9.0\n'
    assert asyncio.run(metric(client(lambda request: httpx.Response(200, text=text)), "queue_waiting")) == 5.0
