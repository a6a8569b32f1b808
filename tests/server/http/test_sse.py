"""Server-sent events: framing, padding, coalescing, disconnects; and the information in packet sizes and times."""

import asyncio
import statistics
from collections.abc import AsyncGenerator

from outrider.server.http import sse

TICK_SECONDS = 0.02


async def source(pattern: list[tuple[float, int]], error: Exception | None = None) -> AsyncGenerator[int | None, None]:
    """Yields each number of tokens after its delay in seconds, None for 0 tokens; raises `error` at the end."""
    for seconds, tokens in pattern:
        await asyncio.sleep(seconds)
        yield tokens or None
    if error:
        raise error


class Timeless(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next scheduled callback."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        times = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and times:  # type: ignore[attr-defined]
            self._now = max(self._now, min(times))
        super()._run_once()  # type: ignore[misc]


def collect(stream: AsyncGenerator[list[int], None]) -> list[tuple[float, list[int]]]:
    async def run() -> list[tuple[float, list[int]]]:
        loop = asyncio.get_running_loop()
        return [(loop.time(), batch) async for batch in stream]

    with asyncio.Runner(loop_factory=Timeless) as runner:
        return runner.run(run())


def test_coalescing_preserves_all_items_and_their_order() -> None:
    pattern = [(0.003, number) for number in range(1, 40)]
    batches = [batch for _, batch in collect(sse.coalesce(source(pattern), TICK_SECONDS))]
    assert batches[0] == [1]  # the first token does not wait
    assert [number for batch in batches for number in batch] == list(range(1, 40))
    assert [len(batch) for batch in batches[1:3]] == [6, 7]


def packets(stream: list[tuple[float, list[int]]], multiple: int) -> list[int]:
    """The packet sizes for tokens of four characters."""
    found = []
    for _, batch in stream:
        chunk = {"choices": [{"index": 0, "delta": {"content": "abcd" * sum(batch)}}]}
        found.append(len(sse.ServerSentEvent(chunk, padded=True).encode(multiple)))
    return found


def test_coalescing_hides_acceptance_from_an_eavesdropper() -> None:
    """Two answers of equal length in tokens and in time; draft tokens are accepted in bursts in one, evenly in the other.

    The eavesdropper knows both and classifies a stream by its number of packets and their mean size.
    """
    evenly = [(0.004, 2)] * 30
    bursts = [(0.012, 6)] * 10  # the same tokens in the same time

    def features(pattern: list[tuple[float, int]], coalesced: bool) -> tuple[float, float]:
        stream = collect(sse.coalesce(source(pattern), TICK_SECONDS) if coalesced else sse.singly(source(pattern)))
        sizes = packets(stream, sse.COALESCED_PADDED_BYTES if coalesced else 0)
        return len(sizes), statistics.mean(sizes)

    def accuracy(coalesced: bool) -> float:
        references = {"evenly": features(evenly, coalesced), "bursts": features(bursts, coalesced)}
        correct = 0
        for kind, pattern in [("evenly", evenly), ("bursts", bursts)] * 4:
            count, size = features(pattern, coalesced)
            distances = {
                name: abs(count - each[0]) / each[0] + abs(size - each[1]) / each[1] for name, each in references.items()
            }
            guess = min(distances, key=distances.__getitem__)
            correct += guess == kind and distances["evenly"] != distances["bursts"]
        return correct / 8

    assert accuracy(coalesced=False) == 1.0
    assert accuracy(coalesced=True) <= 0.5


def test_a_coalesced_stream_that_nobody_takes_stops_reading_its_source() -> None:
    produced = []

    async def endless() -> AsyncGenerator[int | None, None]:
        for number in range(100_000):
            await asyncio.sleep(0)
            produced.append(number)
            yield number

    async def run() -> int:
        stream = sse.coalesce(endless(), TICK_SECONDS)
        taken = await anext(stream)
        for _ in range(1000):  # the reader stands still
            await asyncio.sleep(0)
        stalled = len(produced)
        while len(taken) <= sse.MAX_PENDING_ITEMS:
            taken += await anext(stream)
        await stream.aclose()
        assert taken == list(range(len(taken)))
        return stalled

    assert asyncio.run(run()) <= sse.MAX_PENDING_ITEMS + 2
