"""Client-side timings and their table in 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from bench.http.serve import FIGURES, Timing, compare, make_timing, request_fields, show, stream, summarize
from bench.plan import BenchError, Plan


def test_a_timing_is_computed_from_arrivals() -> None:
    timing = make_timing(12, [10.0, 10.5, 11.0, 12.0])
    assert timing == Timing(12, 2.0, 0.5, [0.5, 1.0])
    assert timing.tokens_per_second == 6.0


def test_medians_of_the_streams() -> None:
    served = [Timing(10, 1.0, 0.1, [0.2]), Timing(30, 1.0, 0.3, [0.4, 0.6]), Timing(20, 1.0, 0.2, [])]
    figures = summarize(served, [0.001] * 99 + [0.002])
    assert figures["tokens_per_second"] == 20.0
    assert figures["first_token_ms_p50"] == 200.0
    assert figures["between_chunks_ms_p50"] == 400.0
    assert figures["health_ms_p50"] == 1.0 <= figures["health_ms_p99"]


def test_answers_are_compared_in_pairs() -> None:
    served = [Timing(10, 1.0, 0.11, []), Timing(10, 2.0, 0.12, []), Timing(10, 4.0, 0.13, [])]
    compared = [Timing(10, 0.5, 0.1, []), Timing(10, 2.0, 0.1, []), Timing(10, 1.0, 0.1, [])]
    figures = compare(served, compared)
    assert figures["served_over_in_process"] == 0.5
    assert figures["first_token_ms_over_in_process"] == 20.0
    assert compare(served, []) == {}


def test_a_stream_is_timed_and_a_refusal_is_reported() -> None:
    chunks = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": {"completion_tokens": 7}}]
    body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    answers = [httpx.Response(200, stream=httpx.ByteStream(body)), httpx.Response(503, stream=httpx.ByteStream(b"loading"))]
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(lambda request: answers.pop(0)))
    fields = request_fields("m", "def f(", 0.8, Plan(["fusion"], [], [0.8], 16, 1))
    assert stream(client, fields).tokens == 7
    with pytest.raises(BenchError, match="503: loading"):
        stream(client, fields)


def test_the_table_fits_80_columns(printed: Callable[[], str]) -> None:
    row: dict[str, Any] = dict.fromkeys(FIGURES, 12345.678)
    show([row | {"temperature": temperature} for temperature in (0.0, 0.8, 1.0)])
    text = printed()
    assert text.count("12345.678") == 3 * len(FIGURES)
    assert all(label in text for label in FIGURES.values())


def test_a_remote_server_is_not_compared(printed: Callable[[], str]) -> None:
    show([{"temperature": 0.0, "tokens_per_second": 100.0}])
    assert "in process (ms)" not in printed()
