"""`outrider bench decode --shape --forced --streams`: several recorded answers at once, in shared rounds and in turns.

In turns, each stream has a forward of its own, as if it were alone. Also measures what a long prompt costs the streams beside
which it is read.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from bench import report
from bench.model.forced import context_of, forced_stream, load_replay
from bench.model.steps import make_runner, node_budget
from bench.recordings import Line, Recordings
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName, Options
from outrider.server.settings import Settings
from outrider.verify.controller import Controller
from outrider.verify.cost import CostCurve
from outrider.verify.decode import step
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.round import run_round
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

IN_TURNS = "in turns"
# A step of each stream, and which of them have ended.
Advance = Callable[[Sequence[Stream]], Iterator[bool]]
# The tokens of the prompt that is read, and the number of streams whose steps share its rounds.
PROMPT_TOKENS, BESIDE = 2000, 3
PLAIN_ROUNDS, PROMPT_REPEATS = 20, 3


def run_streams(
    shape: str,
    settings: Settings,
    options: Options,
    recordings: Recordings,
    drafter: DrafterName,
    counts: Sequence[int],
    max_tokens: int,
    repeats: int,
    out: Path | None,
) -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given. Answers are cut to `max_tokens`. Raises BenchError."""
    lines, resources = load_replay(recordings, options, context_of(shape, settings))
    longest = sorted(lines, key=lambda line: len(line.answer))[-BESIDE:]  # none ends while a prompt is read beside them
    lines = [replace(line, answer=line.answer[:max_tokens]) for line in lines]
    runner = make_runner(shape, settings)
    budget = node_budget(runner, settings)
    gc.freeze()  # as the worker does: collections would delay rounds

    def start(line: Line) -> Stream:
        return forced_stream(runner, drafter, resources, line, *budget)

    runs = {str(count): partial(tokens_per_second, lines, start, count, together) for count in counts}
    runs[IN_TURNS] = partial(tokens_per_second, lines, start, max(counts), in_turns)
    found: dict[str, list[float]] = {name: [] for name in runs}
    with Progress() as progress:
        task = progress.add_task("decoding", total=repeats * len(runs))
        for _ in range(repeats):
            for name, run in runs.items():
                found[name].append(run())
                progress.advance(task)
    beside = [prompt_beside_streams(runner, longest, start, budget[1]) for _ in range(PROMPT_REPEATS)]
    figures = {
        "shape": shape,
        "dtype": str(runner.cache_shape.dtype),
        "stream": recordings.streams[0].name,
        "drafter": drafter,
        "answers": len(lines),
        "results": rates(found),
        "prompt_beside_streams": [each for each in beside if each is not None],
    }
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def together(active: Sequence[Stream]) -> Iterator[bool]:
    """One round; which of the requests have ended."""
    for outcome in run_round(active):
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome is not None and outcome.finish is not None


def in_turns(active: Sequence[Stream]) -> Iterator[bool]:
    """A step of each request alone; which of them have ended."""
    for stream in active:
        yield step(stream).finish is not None


def tokens_per_second(
    lines: Sequence[Line],
    start: Callable[[Line], Stream],
    streams: int,
    advance: Advance,
) -> float:
    """Emitted tokens per second of all lines, of which `streams` are decoded at a time; prompts are read, too."""
    waiting, active = list(lines), list[Stream]()
    started = time.perf_counter()
    while waiting or active:
        while waiting and len(active) < streams:
            active.append(start(waiting.pop(0)))
        ended = list(advance(active))
        for stream in [stream for stream, has_ended in zip(active, ended, strict=True) if has_ended]:
            stream.close()
            active.remove(stream)
    return sum(len(line.answer) for line in lines) / (time.perf_counter() - started)


def rates(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The figures of each number of streams: medians, and medians of paired ratios."""
    turns = found[IN_TURNS]
    return [
        {
            "streams": name,
            "tokens_per_second": round(statistics.median(speeds), 2),
            "over_turns": round(statistics.median(a / b for a, b in zip(speeds, turns, strict=True)), 3),
        }
        for name, speeds in found.items()
    ]


def prompt_beside_streams(
    runner: TorchRunner, lines: Sequence[Line], start: Callable[[Line], Stream], curve: CostCurve | None
) -> dict[str, float] | None:
    """What a long prompt costs the streams beside which it is read, and what they cost it.

    Their rounds while it is read are compared with rounds over the same text without it. Returns None if one of their answers
    ends before the prompt is read.
    """
    controller = Controller()

    def begun() -> list[Stream]:
        streams = [start(line) for line in lines]
        while any(stream.unread_prompt for stream in streams):
            run_round(streams)
        for _ in range(PLAIN_ROUNDS):
            timed_round(streams, controller)
        return streams

    def until_first_token(others: Sequence[Stream]) -> list[float]:
        options = DecodeOptions(SamplingParams(temperature=0), 2, max_nodes=0, curve=curve)
        text = np.random.default_rng(1).integers(0, runner.vocabulary, PROMPT_TOKENS).astype(np.int32)
        newcomer, seconds = Stream(Verifier(runner, runner.new_cache()), NoDrafter(), text, options), []
        while newcomer.remaining == 2:
            seconds.append(timed_round([*others, newcomer], controller))
        newcomer.close()
        return seconds

    alone = until_first_token([])
    streams = begun()
    beside = until_first_token(streams)
    left = [stream.remaining for stream in streams]
    for stream in streams:
        stream.close()
    if not all(left):
        return None
    streams, plain = begun(), list[float]()
    while sum(stream.remaining for stream in streams) > sum(left):
        plain.append(timed_round(streams, controller))
    for stream in streams:
        stream.close()
    return {
        "round_ms": round(1e3 * statistics.median(plain), 2),
        "median_gap_over_plain": round(statistics.median(beside) / statistics.median(plain), 2),
        "p95_gap_over_plain": round(float(np.percentile(beside, 95) / np.percentile(plain, 95)), 2),
        "longest_gap_in_rounds": round(max(beside) / statistics.median(plain), 2),
        "alone_seconds": round(sum(alone), 3),
        "first_token_over_alone": round(sum(beside) / sum(alone), 3),
    }


def timed_round(streams: Sequence[Stream], controller: Controller) -> float:
    """The seconds of one round."""
    started = time.perf_counter()
    for outcome in run_round(streams, controller):
        if isinstance(outcome, Exception):
            raise outcome
    return time.perf_counter() - started


def show(figures: dict[str, Any]) -> None:
    """Prints both tables."""
    columns = {"streams": "streams", "tokens/s": "tokens_per_second:.2f", f"over {IN_TURNS}": "over_turns:.3f"}
    report.print_figures(f"Forced replay of several streams, {figures['drafter']}", columns, figures["results"])
    columns = {
        "round\n(ms)": "round_ms:.2f",
        "median gap\nover plain": "median_gap_over_plain:.2f",
        "p95 gap\nover plain": "p95_gap_over_plain:.2f",
        "longest gap\nin rounds": "longest_gap_in_rounds:.2f",
        "first token\nalone (s)": "alone_seconds:.3f",
        "first token\nover alone": "first_token_over_alone:.3f",
    }
    title = f"A prompt of {PROMPT_TOKENS} tokens, read during the steps of {BESIDE} streams"
    if figures["prompt_beside_streams"]:
        report.print_figures(title, columns, figures["prompt_beside_streams"])
    else:
        print(f"{title}: not measured, because the recorded answers end before it is read.")
