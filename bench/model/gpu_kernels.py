"""The kernels of a step on a GPU by time: what a step is made of, when its whole time is not as predicted."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.model.shapes import random_runner
from outrider.verify.measurement import timed_forward
from outrider.verify.sampling.device import choices
from outrider.verify.sampling_params import SamplingParams

CONTEXTS, NODES = (64, 4096), (0, 16, 63)
SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "and top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "and top_k 20": SamplingParams(temperature=0.8, top_p=0.95, top_k=20),
}
ROUNDS = 21  # timed without the profiler; the first one warms up
STEPS, SHOWN, NAME = 4, 12, 60  # profiled; kernels with the longest times; characters of a kernel's name


def kernels_of_steps(shape: str) -> dict[str, Any]:
    """The figures of forwards of this shape in bfloat16, and of choices."""
    runner = random_runner(shape, torch.bfloat16, "cuda", max(CONTEXTS) + 256)
    figures = dict[str, Any]()
    for context in CONTEXTS:
        cache = runner.new_cache()
        cache.fill(context)
        for nodes in NODES:
            figures[f"{nodes} nodes after {context} tokens"] = kernels_of(partial(timed_forward, runner, cache, nodes))
    logits = 4.0 * torch.randn(max(NODES) + 1, runner.vocabulary, device="cuda").bfloat16()
    for name, params in SAMPLING.items():
        for rows in (nodes + 1 for nodes in NODES):
            figures[f"{rows} tokens, {name}"] = kernels_of(partial(timed_choices, logits[:rows], params))
    del runner, cache
    torch.cuda.empty_cache()
    return figures


def timed_choices(logits: torch.Tensor, params: SamplingParams) -> float:
    """Seconds until the host has a token of each row."""
    started = time.perf_counter()
    choices(logits, params, range(len(logits)), []).arrays()
    return time.perf_counter() - started


def kernels_of(step: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds in all and in kernels, launches, and each kernel's share of both, of a step that returns its seconds."""
    times = [step() for _ in range(ROUNDS)]
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            step()
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
