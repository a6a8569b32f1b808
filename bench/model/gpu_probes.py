"""What a GPU itself does: products by their tiles, and a step's kernels. Needs Triton."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from outrider.verify.model.gpu import triton_products
from outrider.verify.model.gpu.quantized import quantized
from outrider.verify.model.gpu.tiles import Tile
from outrider.verify.model.gpu.triton_products import use_kernel

COPIED_BYTES = 3e8  # of a product's weights, so that the cache holds none
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


class Job(NamedTuple):
    """A product to time: of a layer of SHAPES, by rows and sizes of tiles."""

    name: str
    bits: int
    rows: int
    outputs: int = 0  # of a tile; 0 = as the rule has it
    stages: int = 0
    ahead: int = triton_products.AHEAD

    @property
    def label(self) -> str:
        return f"{self.outputs}x{self.stages}, {self.ahead}" if self.outputs else "rule"


def jobs_of(name: str, bits: int, count: int) -> list[Job]:
    """The rule, other tiles, and other numbers of lines ahead."""
    tiles = [Job(name, bits, count, outputs, stages) for outputs in (64, 128) for stages in (3, 4)]
    lines = [Job(name, bits, count, 64, 3, ahead) for ahead in (0, 4, 16)] if bits == 16 else []
    return [Job(name, bits, count), *tiles, *lines]


def products() -> dict[str, Any]:
    """Microseconds of a layer's products by bits, rows and tile, beside cuBLAS's; and the best over what the rule chose."""
    cases = [(name, bits, count) for bits in (16, 8, 4) for name in SHAPES for count in COUNTS]
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(compiled, [job for case in cases for job in jobs_of(*case)], chunksize=4))
    times: dict[str, dict[str, float]] = {}
    for name, bits, count in cases:
        layers, rows = layers_of(name, bits), torch.randn(count, SHAPES[name][0], dtype=torch.bfloat16, device="cuda")
        found = {job.label: timed(job, layers, rows) for job in jobs_of(name, bits, count)}
        if bits == 16:
            found["cublas"] = by_library(layers, rows)
        times[f"{name}, {bits} bits, {count} rows"] = {label: round(1e6 * value, 2) for label, value in found.items()}
    shares = [min(value for label, value in each.items() if label != "cublas") / each["rule"] for each in times.values()]
    return {"us": times, "best_over_rule": round(statistics.mean(shares), 3)}


def by_library(layers: Sequence[Any], rows: torch.Tensor) -> float:
    """Seconds of a product by cuBLAS."""
    return replayed(lambda: [torch.nn.functional.linear(rows, layer.weight) for layer in layers]) / len(layers)


def layers_of(name: str, bits: int) -> list[Any]:
    """Layers whose weights are more than the cache holds."""
    inputs, outputs = SHAPES[name]
    copies = max(2, int(COPIED_BYTES / (inputs * outputs * bits / 8)))
    return [layer_of(torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda"), bits) for _ in range(copies)]


def layer_of(weight: torch.Tensor, bits: int) -> Any:
    layer = torch.nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bits < 16:
        return quantized(layer, bits, weight.device)
    use_kernel([layer])
    return layer


def compiled(job: Job) -> None:
    inputs, outputs = SHAPES[job.name]
    layer = layer_of(torch.zeros(outputs, inputs, dtype=torch.bfloat16, device="cuda"), job.bits)
    with tiles_of(job):
        layer(torch.zeros(job.rows, inputs, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()


def timed(job: Job, layers: Sequence[Any], rows: torch.Tensor) -> float:
    with tiles_of(job):
        return replayed(lambda: [layer(rows) for layer in layers]) / len(layers)


@contextmanager
def tiles_of(job: Job) -> Iterator[None]:
    """Products inside have the tiles of this job."""
    rule = Tile.of

    def tile(*arguments: Any, **named: Any) -> Tile:
        usual = rule(*arguments, **named)
        inputs = 64 if job.bits != 4 and (job.outputs > 64 or usual.rows == 128) else 128
        return usual._replace(outputs=job.outputs, inputs=inputs, warps=4 if job.outputs == 64 else 8)

    def stages(_: Tile, shared_bytes: int, block_bytes: int) -> int:
        return max(2, min(job.stages, shared_bytes // block_bytes))

    with ExitStack() as stack:
        stack.enter_context(patch.object(triton_products, "AHEAD", job.ahead))
        if job.outputs:
            stack.enter_context(patch.object(Tile, "of", staticmethod(tile)))
            stack.enter_context(patch.object(Tile, "stages", stages))
        yield


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
