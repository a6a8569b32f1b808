"""`outrider bench decode --shape`: what steps cost at a known shape, and with --forced what a real model would gain by them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from bench.decode import BenchError, Tally, peak_memory_mb
from bench.model.bandwidth import linear_pass, read_bytes_per_second
from bench.model.forced import forced_answer
from bench.model.shapes import SHAPES, random_runner
from bench.replay import Line, load_corpus, load_encoder, load_stream, tables
from drafters.interface import MAX_NODES
from drafters.options import DrafterName
from drafters.registry import warm
from server.settings import Settings
from server.worker.runtime import default_threads
from verify.cost import CONTEXTS, measure, timed_forward
from verify.model.loading import resolve_device
from verify.model.runner import ModelRunner

STEP_NODES = (0, 1, 2, 4, 8, 16, 32, 63, MAX_NODES)
ROUNDS = 25


def make_runner(shape: str, settings: Settings) -> ModelRunner:
    """The shape with the settings' dtype (bfloat16 where that is auto), device, context and threads. Raises BenchError."""
    if shape not in SHAPES:
        raise BenchError(f"There is no shape {shape!r}; there are {', '.join(SHAPES)}.")
    chosen = settings.model
    dtype = torch.bfloat16 if chosen.dtype == "auto" else getattr(torch, chosen.dtype)
    runner = random_runner(shape, dtype, chosen.device, chosen.context_tokens, chosen.pack, chosen.trace, chosen.compile)
    torch.set_num_threads(chosen.threads or default_threads(runner))
    return runner


def run_steps(shape: str, settings: Settings, out: Path | None) -> dict[str, Any]:
    """Seconds of a step by nodes and context, beside the linear layers alone and the memory's limit. Raises BenchError."""
    runner = make_runner(shape, settings)
    curve, rounds = measure(runner, STEP_NODES), short_rounds(runner)
    speed, size = read_bytes_per_second(runner), runner.weight_bytes
    single = statistics.median(steps[0] for _, steps in rounds)
    figures = {
        "shape": shape,
        "dtype": str(runner.cache_shape.dtype),
        "device": str(resolve_device(settings.model.device)),
        "threads": torch.get_num_threads(),
        "weights_mb": round(size / 1e6, 1),
        "measured_read_gb_per_second": round(speed / 1e9, 2),
        "linear_layers_ms": round(1e3 * statistics.median(linear for linear, _ in rounds), 3),
        "single_token_step_ms": round(1e3 * single, 3),
        "single_token_step_over_linear_layers": round(statistics.median(steps[0] / linear for linear, steps in rounds), 3),
        "single_token_step_share_of_bandwidth": round(size / single / speed, 3),
        "step_ms": {
            str(context): {str(nodes): round(1e3 * seconds, 3) for nodes, seconds in zip(curve.nodes, row, strict=True)}
            for context, row in zip(curve.contexts, curve.seconds, strict=True)
        },
        "nodes_over_single": {
            str(nodes): round(statistics.median(steps[at] / steps[0] for _, steps in rounds), 3)
            for at, nodes in enumerate(STEP_NODES)
        },
        "peak_memory_mb": peak_memory_mb(),
    }
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
    if out:
        report.save(out, figures)
    return figures


def short_rounds(runner: ModelRunner) -> list[tuple[float, list[float]]]:
    """The linear layers alone and steps of all sizes after a short text, in turns, so that each round is a fair comparison."""
    cache, linear = runner.new_cache(), linear_pass(runner)
    cache.length = CONTEXTS[0]
    cache.tensor[:, :, :, : cache.length] = 0
    rounds = [(linear(), [timed_forward(runner, cache, nodes) for nodes in STEP_NODES]) for _ in range(ROUNDS + 1)]
    return rounds[1:]  # the first one warms up


def run_forced(
    shape: str,
    settings: Settings,
    stream: Path,
    tokenizer: str,
    corpus: Sequence[Path],
    drafters: Sequence[DrafterName],
    limit: int | None,
    repeats: int,
    out: Path | None,
) -> dict[str, Any]:
    """Decodes recorded answers at that shape, drafters in turn. Raises BenchError."""
    encoder = load_encoder(tokenizer)
    lines = fitting(load_stream(stream, encoder, limit)[0], make_context(settings))
    resources = tables(
        load_corpus(list(corpus), encoder) if corpus else np.empty(0, np.uint32), len(encoder), settings.speculation.options
    )
    warm(resources)
    runner = make_runner(shape, settings)
    nodes = settings.speculation.max_nodes
    curve = measure(runner) if nodes == "auto" else None
    tallies = {name: Tally() for name in drafters}
    with Progress() as progress:
        task = progress.add_task("decoding", total=repeats * len(drafters) * len(lines))
        for _ in range(repeats):
            for name, tally in tallies.items():
                answers, started = [], time.perf_counter()
                for line in lines:
                    answers.append(forced_answer(runner, name, resources, line, MAX_NODES if nodes == "auto" else nodes, curve))
                    progress.advance(task)
                tally.add(answers, time.perf_counter() - started)
    size, speed = runner.weight_bytes, read_bytes_per_second(runner)
    first = statistics.median(tallies[drafters[0]].tokens_per_second)
    figures: dict[str, Any] = {
        "shape": shape,
        "dtype": str(runner.cache_shape.dtype),
        "stream": stream.name,
        "answers": len(lines),
        "max_nodes": nodes,
        "peak_memory_mb": peak_memory_mb(),
        "results": [
            {
                "drafter": name,
                **tally.figures(size, speed),
                f"times_{drafters[0]}": round(statistics.median(tally.tokens_per_second) / first, 3),
            }
            for name, tally in tallies.items()
        ],
    }
    show_forced(figures["results"], drafters[0])
    if out:
        report.save(out, figures)
    return figures


def show_forced(rows: Sequence[dict[str, Any]], first: DrafterName) -> None:
    """The figures as a table."""
    table = Table("drafter", "tokens/s", "tokens/step", "verify ms", f"times {first}")
    for row in rows:
        cells = (row["tokens_per_second"], row["tokens_per_step"], row["verify_ms_per_step"], row[f"times_{first}"])
        table.add_row(row["drafter"], *map(str, cells))
    Console().print(table)


def make_context(settings: Settings) -> int:
    """Tokens that an answer with its prompt may have."""
    return settings.model.context_tokens or 4096


def fitting(lines: Sequence[Line], context: int) -> list[Line]:
    """The lines whose answers fit the context with at least as much prompt. Raises BenchError where none does."""
    kept = [line for line in lines if 1 < len(line.answer) < context // 2]
    if not kept:
        raise BenchError("No recorded answer fits the context; give a longer --model.context_tokens.")
    return kept
