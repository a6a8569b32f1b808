"""The kernels of a step on a GPU by time: what a step is made of, when its whole time is not as predicted."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.model.shapes import random_runner
from outrider.verify.measurement import timed_forward
from outrider.verify.model.torch_runner import TorchRunner

CONTEXTS, NODES = (64, 4096), (0, 16, 63)
ROUNDS = 21  # timed without the profiler; the first one warms up
STEPS, SHOWN, NAME = 4, 12, 60  # profiled; kernels with the longest times; characters of a kernel's name


def kernels_of_steps(shape: str) -> dict[str, Any]:
    """Of forwards of this shape in bfloat16: milliseconds in all and in kernels, launches, and each kernel's share of both."""
    runner = random_runner(shape, torch.bfloat16, "cuda", max(CONTEXTS) + 256)
    figures = {
        f"{nodes} nodes after {context} tokens": _kernels_of_step(runner, context, nodes)
        for context in CONTEXTS
        for nodes in NODES
    }
    del runner
    torch.cuda.empty_cache()
    return figures


def _kernels_of_step(runner: TorchRunner, context: int, nodes: int) -> dict[str, Any]:
    cache = runner.new_cache()
    cache.fill(context)
    times = [timed_forward(runner, cache, nodes) for _ in range(ROUNDS)]
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            timed_forward(runner, cache, nodes)
    microseconds, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in found.events() or ():
        if event.device_type.name == "CUDA":
            microseconds[event.name[:NAME]] += event.time_range.elapsed_us() / STEPS
            launches[event.name[:NAME]] += 1
    longest = sorted(microseconds, key=microseconds.__getitem__, reverse=True)[:SHOWN]
    return {
        "whole_ms": round(1e3 * statistics.median(times[1:]), 3),
        "launches": sum(launches.values()) // STEPS,
        "kernels_ms": round(sum(microseconds.values()) / 1e3, 3),
        "kernels_us": {name: [round(microseconds[name], 1), launches[name] // STEPS] for name in longest},
    }
