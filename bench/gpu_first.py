"""`outrider bench gpu`: what to run first on a GPU, each figure beside its prediction and the decision that it makes.

Each part is saved as soon as it is done, so that a command that ends early keeps its finished parts. The parts are in order of
what depends on them: two commands of six minutes run all of them (`--only` names those of one).
"""

import gc
import statistics
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from bench import report
from bench.model.shapes import random_runner
from bench.plan import PROMPTS, BenchError, Plan, read_prompts
from outrider.server.settings import Settings
from outrider.verify.measurement import any_tokens
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.shape import KVDtype
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.text_work import INVARIANT_ROWS
from outrider.verify.model.invariance import TREES, holds
from outrider.verify.model.load_options import Quantize
from outrider.verify.model.torch_runner import TorchRunner

TESTS = "tests/verify/model/gpu"
SHAPE, MIXTURE = "llama-3-8b", "qwen3-30b-a3b"
CONTEXTS, ROWS = (64, 4096), (1, 2, 4, 8, 16, 32, 64, 72, 128, 256)
FORWARDS = 10  # in a row, timed by events
ROUNDS = 21  # timed without the profiler; the first one warms up
STEPS, SHOWN, NAME = 4, 12, 60  # profiled; kernels with the longest times; characters of a kernel's name
# Streams that share a forward, the draft nodes of each, their text, and how often a forward is timed.
COUNTS, NODES, TEXT_TOKENS, REPEATS = (1, 2, 4, 8), (0, 7), 512, 15
PAGED_SHAPE, PAGED_CONTEXT, JOINING_ROUNDS, MOST_STREAMS = "llama-7m", 2048, 2000, 8


class Prediction(NamedTuple):
    """What a figure should be, and what it decides."""

    figure: str  # part and keys, separated by dots
    expected: str
    decides: str


PREDICTIONS = (
    Prediction("bits16.rows_64.1", "4.1", "the aim of a plain step in 16 bits"),
    Prediction("bits16.rows_64.64", "5.0", "the aim of 64 rows"),
    Prediction("bits4.rows_64.1", "2.1", "the aim of a plain step in 4 bits"),
    Prediction("bits8.rows_64.1", "2.4", "whether instructions or bytes limit 8 bits"),
    Prediction("bits16.prompt_tokens_per_second", "17000", "whether prompts need products of their own"),
    Prediction("bits16.start_seconds", "12", "the aim of a start"),
    Prediction("bits16.invariant", "True", "whether drafts change answers in 16 bits"),
    Prediction("bits4.invariant", "True", "whether they do in 4 bits"),
    Prediction("tests.passed", "True", "whether kernels are right: stop if not"),
    Prediction("mixture.rows_64.1", "3.5", "what experts are split and tiled by"),
    Prediction("mixture.rows_64.64", "17", "tiles of experts of many rows"),
    Prediction("mixture4.rows_64.1", "2.5", "whether experts in 4 bits are read at the bandwidth"),
    Prediction("lossless.divergences", "0", "whether drafted answers are plain decoding's"),
    Prediction("streams.tokens_over_one_stream.8", "6", "how many streams share a forward"),
    Prediction("pages.steady", "True", "whether joining and leaving loses a page"),
)


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds that the GPU takes for it, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def machine() -> dict[str, Any]:
    """The card, its clocks under load, and the bandwidth of copies and sums by events."""
    memory, other = torch.ones(1 << 30, device="cuda"), torch.empty(1 << 30, device="cuda")
    copied = [seconds_of(lambda: other.copy_(memory)) for _ in range(5)]
    summed = [seconds_of(lambda: memory.sum()) for _ in range(5)]
    clocks = ["nvidia-smi", "--query-gpu=name,clocks.sm,clocks.mem,power.draw,driver_version", "--format=csv,noheader"]
    return {
        "nvidia_smi": subprocess.run(clocks, capture_output=True, text=True).stdout.strip(),
        "copy_gb_per_second": round(2 * memory.nbytes / min(copied) / 1e9),
        "read_gb_per_second": round(memory.nbytes / min(summed) / 1e9),
    }


def tests() -> dict[str, Any]:
    """The tests of GPU kernels, in processes of their own."""
    ignored = [f"--ignore={TESTS}/{name}" for name in ("fake", "compiled")]
    command = [sys.executable, "-m", "pytest", "-q", "-n12", "-pno:cacheprovider", "-pno:benchmark", *ignored, TESTS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=110)
    failed = [line[:300] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"passed": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1:], "failed": failed}


def forwards(shape: str, bits: Quantize = "none", kv: KVDtype = "auto") -> dict[str, Any]:
    """Forwards of a shape by rows and context in milliseconds, what its kernels take, and what a start takes."""
    started = time.perf_counter()
    context = max(CONTEXTS) + 512
    runner = random_runner(shape, torch.bfloat16, "cuda", context, bits, kv)
    runner.start(context, INVARIANT_ROWS)  # as the server does where rows are invariant
    torch.cuda.synchronize()
    figures: dict[str, Any] = {"start_seconds": round(time.perf_counter() - started, 1)}
    figures["weights_mb"] = round(runner.weight_bytes / 1e6)
    figures["allocated_mb"] = torch.cuda.memory_allocated() >> 20
    figures["peak_mb"] = torch.cuda.max_memory_allocated() >> 20
    cache = runner.new_cache()
    for text in CONTEXTS:
        cache.fill(text, torch.Generator("cuda").manual_seed(0))
        figures[f"rows_{text}"] = {str(rows): round(1e3 * forward_seconds(runner, cache, rows), 3) for rows in ROWS}
        for rows in (1, 64):
            step = partial(one_forward, runner, cache, rows)
            figures[f"kernels_{rows}_{text}"] = kernels_of(step)
    host = [host_seconds(runner, cache, rows) for rows in (1, 64)]
    figures["host_ms"] = [round(1e3 * seconds, 3) for seconds in host]
    figures["invariant"] = holds(runner, TREES)
    prompt = ForwardBatch.chain(any_tokens(2048, runner.vocabulary))
    cache.fill(64, torch.Generator("cuda").manual_seed(0))
    graphed, tree = runner.graphs, ForwardBatch.chain(any_tokens(9, runner.vocabulary))
    logits = runner.forward(cache, tree).float().clone()
    for name, graphs in (("prompt_tokens_per_second", graphed), ("eager_prompt_tokens_per_second", None)):
        runner.graphs = graphs
        runner.forward(cache, prompt, logits=False)
        figures[name] = round(2048 / seconds_of(lambda: runner.forward(cache, prompt, logits=False)))
    exact = runner.forward(cache, tree).float()
    figures["difference_from_eager"] = round(float((logits - exact).norm() / exact.norm()), 5)
    return figures


def one_forward(runner: TorchRunner, cache: Any, rows: int) -> float:
    """Seconds of a forward, with the wait for it."""
    started = time.perf_counter()
    runner.forward(cache, ForwardBatch.chain(any_tokens(rows, runner.vocabulary)))
    torch.cuda.synchronize()
    return time.perf_counter() - started


def host_seconds(runner: TorchRunner, cache: Any, rows: int) -> float:
    """Seconds until a forward is launched: the median of some."""

    def launched() -> float:
        torch.cuda.synchronize()
        batch = ForwardBatch.chain(any_tokens(rows, runner.vocabulary))
        started = time.perf_counter()
        runner.forward(cache, batch)
        return time.perf_counter() - started

    return statistics.median(launched() for _ in range(20))


def forward_seconds(runner: TorchRunner, cache: Any, rows: int) -> float:
    """Seconds of a forward by events, of several that follow each other: the least of some medians."""
    batch = ForwardBatch.chain(any_tokens(rows, runner.vocabulary))

    def several() -> None:
        for _ in range(FORWARDS):
            runner.forward(cache, batch)

    several()
    return min(seconds_of(several) for _ in range(3)) / FORWARDS


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


def lossless() -> dict[str, Any]:
    """Compares drafted answers of the embedded model in float32 with plain decoding."""
    from bench.lossless import run

    plan = Plan(["trigram", "fusion"], read_prompts(PROMPTS, 8), [0.0, 0.8], 96, 1)
    divergences = run(Settings.model_validate({"model": {"dtype": "float32"}}), plan)
    answers = len(plan.drafters) * len(plan.prompts) * len(plan.temperatures)
    return {
        "answers": answers,
        "divergences": len(divergences),
        "margins": [each["margin"] for each in divergences],
    }


def memory() -> dict[str, Any]:
    """The number of memory segments that torch has allocated after each of several equal answers."""
    from bench.decode import answer, encode
    from outrider.server.worker.runtime import load

    settings = Settings()
    runtime = load(settings)
    plan = Plan(["fusion"], read_prompts(PROMPTS, 1), [0.8], 256, 1)
    prompt = encode(runtime, plan.prompts[0])
    segments = []
    for _ in range(4):
        answer(runtime, settings, "fusion", prompt, 0.8, plan)
        segments.append(torch.cuda.memory_stats()["segment.all.allocated"])
    return {"segments_allocated_after_answers": segments}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "machine": machine,
    "bits16": partial(forwards, SHAPE),
    "bits4": partial(forwards, SHAPE, "int4"),
    "tests": tests,
    "mixture": partial(forwards, MIXTURE),
    "mixture4": partial(forwards, MIXTURE, "int4"),
    "bits8": partial(forwards, SHAPE, "int8"),
    "cache8": partial(forwards, SHAPE, "int4", "int8"),
    "lossless": lossless,
    "streams": partial(shared_forwards, SHAPE, max(CONTEXTS)),
    "memory": memory,
    "pages": pages,
}


def measured(figures: dict[str, Any], path: str) -> Any:
    found: Any = figures
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def free_memory() -> None:
    """Returns what a part has left to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def run(names: list[str], out: Path) -> None:
    """Runs the parts, saves after each, and prints figures beside predictions."""
    console, figures, began = Console(highlight=False), dict[str, Any](), time.perf_counter()
    for name in names:
        started = time.perf_counter()
        try:
            figures[name] = PARTS[name]()
        except Exception as error:  # the other parts must still run
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-2000:]}
        free_memory()
        figures[name]["seconds"] = round(time.perf_counter() - started, 1)
        predictions = {each.figure: {"expected": each.expected, "decides": each.decides} for each in PREDICTIONS}
        report.save(out, figures | {"predictions": predictions, "seconds": round(time.perf_counter() - began, 1)})
        console.print(name, {key: value for key, value in figures[name].items() if "kernels_" not in key})
    rows = [(each.figure, each.expected, measured(figures, each.figure)) for each in PREDICTIONS]
    found = [row for row in rows if row[2] is not None]
    report.print_table("Predictions", ("figure", "expected", "measured"), found)


def chosen_parts(only: str) -> list[str]:
    """The names of the parts to run, in this order: those in `only`, or all. Raises BenchError, also without a GPU."""
    names = only.split(",") if only else list(PARTS)
    if unknown := {*names} - {*PARTS}:
        raise BenchError(f"There is no part {sorted(unknown)[0]}; name some of {', '.join(PARTS)}.")
    if not torch.cuda.is_available():
        raise BenchError("torch finds no GPU; run bench gpu on a machine that has one.")
    return names
