"""The kernels of a step on a GPU by time: what a step is made of, when its whole time is not as predicted."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

ROUNDS = 21  # timed without the profiler; the first one warms up
STEPS, SHOWN, NAME = 4, 12, 60  # profiled; kernels with the longest times; characters of a kernel's name


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
