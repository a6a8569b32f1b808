"""What a GPU itself does: the price of launches, and of products by the sizes of their tiles. Needs Triton."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as gdc

from outrider.verify.model.gpu import triton_products
from outrider.verify.model.gpu.triton_products import KernelLinear, Tile, counters

NODES = 400  # of the graph of launches
COPIES = 6  # of a product's weights, so that the cache holds none
SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
COUNTS = (1, 16, 64)


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds that the GPU takes for it, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def replayed(work: Callable[[], Any]) -> float:
    """Seconds of work in a graph: the median of some replays."""
    work()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        work()
    graph.replay()
    return statistics.median(seconds_of(graph.replay) for _ in range(7))


@triton.jit
def add_one(values, count, dependent: tl.constexpr, block: tl.constexpr):
    if dependent:
        gdc.gdc_launch_dependents()
        gdc.gdc_wait()
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(values + at, tl.load(values + at, at < count) + 1.0, at < count)


def gaps() -> dict[str, Any]:
    """Microseconds of a small kernel in a graph of many, launched after its predecessor's end, and before."""
    values = torch.zeros(132 * 128, device="cuda")

    def chain(dependent: bool) -> None:
        for _ in range(NODES):
            add_one[132,](values, values.numel(), dependent, 128, num_warps=4, launch_pdl=dependent)

    found = {}
    for name, dependent in (("plain_us", False), ("dependent_us", True)):
        values.zero_()
        found[name] = round(1e6 * replayed(partial(chain, dependent)) / NODES, 3)
        found[name.replace("us", "right")] = len(values.unique()) == 1
    return found


def products(shape: str) -> dict[str, Any]:
    """Microseconds of a layer's products by rows and tile, beside cuBLAS's; and the best over what the rule chose."""
    jobs = [(name, count, size, stages) for name in SHAPES for count in COUNTS for size in (64, 128, 256) for stages in (3, 4)]
    with ProcessPoolExecutor(12, get_context("spawn")) as pool:
        list(pool.map(partial(timed, just_compiled=True), jobs, chunksize=3))
    times: dict[str, dict[str, Any]] = {}
    best_over_rule = []
    for name, (inputs, outputs) in SHAPES.items():
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(COPIES)]
        for count in COUNTS:
            rows = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
            library = replayed(lambda: [torch.nn.functional.linear(rows, weight) for weight in weights]) / COPIES
            chosen = replayed(lambda: [of(weight)(rows) for weight in weights]) / COPIES
            found = {"cublas": library, "rule": chosen}
            for job in jobs:
                if job[:2] == (name, count):
                    found[f"{job[2]}x{job[3]}"] = timed(job, weights, rows)
            times[f"{name}_{count}"] = {key: round(1e6 * value, 2) for key, value in found.items()}
            best_over_rule.append(min(value for key, value in found.items() if "x" in key) / chosen)
    return {"us": times, "best_over_rule": round(statistics.mean(best_over_rule), 3)}


def of(weight: torch.Tensor) -> KernelLinear:
    """A layer with this weight."""
    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.__class__ = KernelLinear
    layer.arrived = counters(len(weight), weight.device)
    return layer


def timed(
    job: tuple[str, int, int, int],
    weights: Sequence[torch.Tensor] = (),
    rows: torch.Tensor | None = None,
    just_compiled: bool = False,
) -> float:
    """Seconds of a product with tiles of this many outputs and blocks ahead."""
    name, count, size, stages = job
    inputs, outputs = SHAPES[name]
    if rows is None:
        weights = [torch.zeros(outputs, inputs, dtype=torch.bfloat16, device="cuda")]
        rows = torch.zeros(count, inputs, dtype=torch.bfloat16, device="cuda")
    rule = Tile.of

    def tile(*arguments: Any, **named: Any) -> Any:
        usual = rule(*arguments, **named)
        inputs_at_once = 64 if size > 64 or usual.rows == 128 else 128
        return Forced(usual.rows, usual.more_rows, size, inputs_at_once, 4 if size == 64 else 8)

    class Forced(Tile):
        def stages(self, shared_bytes: int, block_bytes: int) -> int:
            return max(2, min(stages, shared_bytes // block_bytes))

    triton_products.Tile.of = staticmethod(tile)  # type: ignore[method-assign]
    try:
        layers = [of(weight) for weight in weights]
        if just_compiled:
            layers[0](rows)
            torch.cuda.synchronize()
            return 0.0
        return replayed(lambda: [layer(rows) for layer in layers]) / len(layers)
    finally:
        triton_products.Tile.of = rule  # type: ignore[method-assign]
