"""Streams by a clock, and what an eavesdropper can tell from the packets with one and without."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from server.http.coalesce import by_clock, one_by_one
from server.openai.answers import PADDED_TICK_BYTES, padded, sse
from tests.servers import Served

TICK_SECONDS = 0.02


async def source(pattern: list[tuple[float, int]], error: Exception | None = None) -> AsyncGenerator[int | None, None]:
    """Numbers of tokens, each after so many seconds; 0 is None."""
    for seconds, tokens in pattern:
        await asyncio.sleep(seconds)
        yield tokens or None
    if error:
        raise error


class Timeless(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next thing to do."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def collect(stream: AsyncGenerator[list[int], None]) -> list[tuple[float, list[int]]]:
    """The batches and when they came."""

    async def run() -> list[tuple[float, list[int]]]:
        loop = asyncio.get_running_loop()
        return [(loop.time(), batch) async for batch in stream]

    with asyncio.Runner(loop_factory=Timeless) as runner:
        return runner.run(run())


def test_without_a_clock_all_passes() -> None:
    assert [batch for _, batch in collect(one_by_one(source([(0, 3), (0, 0), (0, 2)])))] == [[3], [], [2]]


def test_with_a_clock_nothing_is_lost_and_nothing_changes_order() -> None:
    pattern = [(0.003, number) for number in range(1, 40)]
    batches = [batch for _, batch in collect(by_clock(source(pattern), TICK_SECONDS))]
    assert batches[0] == [1]  # the first token does not wait
    assert [number for batch in batches for number in batch] == list(range(1, 40))
    assert [len(batch) for batch in batches[1:3]] == [6, 7]


def test_a_tick_without_tokens_is_a_packet_too() -> None:
    batches = [batch for _, batch in collect(by_clock(source([(0, 1), (5 * TICK_SECONDS, 2)]), TICK_SECONDS))]
    assert [len(batch) for batch in batches] == [1, 0, 0, 0, 0, 1]


def test_signs_of_life_pass_before_the_first_token() -> None:
    batches = [batch for _, batch in collect(by_clock(source([(0, 0), (0.001, 0), (0.001, 7)]), TICK_SECONDS))]
    assert batches == [[], [], [7]]


def test_errors_come_through_after_what_came_before_them() -> None:
    async def run() -> list[list[int]]:
        found: list[list[int]] = []
        with pytest.raises(ValueError, match="broken"):
            async for batch in by_clock(source([(0, 1), (0, 2)], ValueError("broken")), TICK_SECONDS):
                found.append(batch)
        return found

    assert [number for batch in asyncio.run(run()) for number in batch] == [1, 2]


def test_who_stops_listening_stops_the_source() -> None:
    ended = []

    async def endless() -> AsyncGenerator[int | None, None]:
        try:
            while True:
                await asyncio.sleep(0.001)
                yield 1
        finally:
            ended.append(True)

    async def run() -> None:
        stream = by_clock(endless(), TICK_SECONDS)
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert ended == [True]


def packets(stream: list[tuple[float, list[int]]], multiple: int) -> list[int]:
    """The sizes on the wire, of tokens of four characters."""
    found = []
    for _, batch in stream:
        chunk = {"choices": [{"index": 0, "delta": {"content": "abcd" * sum(batch)}}]}
        found.append(len(sse(padded(chunk, multiple) if multiple else chunk)))
    return found


def test_a_servers_streams_go_by_the_clock(coalescing: Served) -> None:
    """Chats, completions and responses: the same text in fewer packets, padded ones all as long."""
    obfuscated = {"stream_options": {"include_obfuscation": True}}
    common = {"model": coalescing.model, "temperature": 0.8, "seed": 3, "stream": True} | obfuscated
    asked = {
        "/v1/completions": {"prompt": "def f(", "max_tokens": 90},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 90},
        "/v1/responses": {"input": "hi", "max_output_tokens": 90},
    }
    for path, fields in asked.items():
        fields |= {"ignore_eos": True} if "responses" not in path else {}
        whole = coalescing.http.post(path, json=common | fields | {"stream": False, "stream_options": None}).json()
        with coalescing.http.stream("POST", path, json=common | fields) as response:
            assert response.status_code == 200, response.read()
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        texts = [text for chunk in chunks if (text := said(chunk))]
        assert "".join(texts) == said_whole(whole)
        assert 1 <= len(texts) < 20  # of ninety tokens
        sizes = {len(line.encode()) % PADDED_TICK_BYTES for line, chunk in zip(lines, chunks, strict=True) if said(chunk)}
        assert len(sizes) == 1


def said(chunk: dict[str, Any]) -> str:
    """The text of a packet of any endpoint."""
    if chunk.get("type") == "response.output_text.delta":
        return str(chunk["delta"])
    choice = (chunk.get("choices") or [{}])[0]
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def said_whole(answer: dict[str, Any]) -> str:
    """The text of a whole answer of any endpoint."""
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_what_an_eavesdropper_can_tell() -> None:
    """Answers of the same length in tokens and in time, whose drafts get accepted in bursts or evenly.

    The eavesdropper knows both kinds and guesses by the number of packets and by how much their sizes vary.
    """
    evenly = [(0.004, 2)] * 30
    bursts = [(0.012, 6)] * 10  # the same tokens in the same time

    def features(pattern: list[tuple[float, int]], clock: bool) -> tuple[float, float]:
        stream = collect(by_clock(source(pattern), TICK_SECONDS) if clock else one_by_one(source(pattern)))
        sizes = packets(stream, PADDED_TICK_BYTES if clock else 0)
        return len(sizes), statistics.mean(sizes)

    def told_apart(clock: bool) -> float:
        known = {"evenly": features(evenly, clock), "bursts": features(bursts, clock)}
        right = 0
        for kind, pattern in [("evenly", evenly), ("bursts", bursts)] * 4:
            seen = features(pattern, clock)
            near = {name: abs(seen[0] - each[0]) / each[0] + abs(seen[1] - each[1]) / each[1] for name, each in known.items()}
            right += min(near, key=near.__getitem__) == kind and near["evenly"] != near["bursts"]
        return right / 8

    assert told_apart(clock=False) == 1.0
    assert told_apart(clock=True) <= 0.5
