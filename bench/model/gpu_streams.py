"""Several streams on a GPU: the forwards that they share, rows that are invariant, and pages in steady state."""

import statistics
import time
from random import Random
from typing import Any

import torch

from bench.model.shapes import random_runner
from outrider.verify.measurement import any_tokens
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.torch_runner import TorchRunner

# The numbers of streams.
COUNTS = (1, 2, 4, 8)
TEXT_TOKENS = 512
# The draft nodes of each stream.
NODES = (0, 7)
REPEATS = 15
PAGED_SHAPE, PAGED_CONTEXT, JOINING_ROUNDS, MOST_STREAMS = "llama-7m", 2048, 2000, 8


def shared_forwards(shape: str, context_tokens: int) -> dict[str, Any]:
    """Milliseconds of a forward by draft nodes and number of streams; tokens of plain streams, relative to one stream's."""
    runner = random_runner(shape, torch.bfloat16, "cuda", context_tokens)
    caches = [runner.new_cache() for _ in range(COUNTS[-1])]
    for cache in caches:
        cache.fill(TEXT_TOKENS)
    seconds = {nodes: {count: _forward_seconds(runner, caches[:count], nodes) for count in COUNTS} for nodes in NODES}
    return {
        "forward_ms": {str(nodes): {str(n): round(1e3 * each, 3) for n, each in by.items()} for nodes, by in seconds.items()},
        "tokens_over_one_stream": {str(count): round(count * seconds[0][1] / seconds[0][count], 3) for count in COUNTS},
    }


def _forward_seconds(runner: TorchRunner, caches: list[TensorCache], nodes: int) -> float:
    """The median of several forwards over the root and `nodes` draft nodes of each stream, of any tokens."""
    tokens = any_tokens(len(caches) * (nodes + 1), runner.vocabulary).reshape(len(caches), -1)
    segments = [Segment(cache, ForwardBatch.chain(rows)) for cache, rows in zip(caches, tokens, strict=True)]
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        for logits in runner.forward_all(segments):
            logits.max(-1).indices.cpu()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def pages() -> dict[str, Any]:
    """Streams that fork, grow and leave: whether all pages come back and no memory is allocated after a while."""
    runner = random_runner(PAGED_SHAPE, torch.bfloat16, "cuda", PAGED_CONTEXT)
    join_and_leave(runner, JOINING_ROUNDS // 10)
    free = runner.free_pages
    before, segments = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["segment.all.allocated"]
    rounds_per_second = join_and_leave(runner, JOINING_ROUNDS)
    grown = torch.cuda.memory_allocated() - before
    steady = grown == 0 and torch.cuda.memory_stats()["segment.all.allocated"] == segments and runner.free_pages == free
    return {"steady": steady, "grown_bytes": grown, "rounds_per_second": round(rounds_per_second, 1)}


def join_and_leave(runner: TorchRunner, rounds: int) -> float:
    """Rounds of up to MOST_STREAMS streams that join, fork, are swapped out and leave at random; returns rounds a second."""
    random, streams = Random(0), [runner.new_cache()]
    started = time.perf_counter()
    for _ in range(rounds):
        if len(streams) < MOST_STREAMS and random.random() < 0.3:
            streams.append(runner.new_cache())
            streams[-1].fork(random.choice(streams), random.randrange(runner.context_tokens // 2))
        if len(streams) > 1 and random.random() < 0.3:
            streams.pop(random.randrange(len(streams)))
        moved = random.choice(streams)
        if random.random() < 0.1:
            moved.fork(moved.swap_out(), runner.context_tokens)
        rows = [random.randint(1, 9) for _ in streams]
        batches = [ForwardBatch.chain(torch.zeros(count, dtype=torch.int64)) for count in rows]
        runner.forward_all([Segment(cache, batch) for cache, batch in zip(streams, batches, strict=True)])
        for cache, count in zip(streams, rows, strict=True):
            cache.commit(sorted(random.sample(range(count), random.randint(1, count))))
            if cache.length > runner.context_tokens // 2:
                cache.truncate(0)
    return rounds / (time.perf_counter() - started)
