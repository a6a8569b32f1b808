"""`outrider bench decode --shape --forced --streams`: several recorded answers at once, in shared rounds and in turns.

Forced replay: real forwards of random weights emit recorded answers. The costs are those of this machine, the acceptance is
that of the model that wrote the answers. Logits of random weights are meaningless, so drafters get no feedback. In turns, each
stream has a forward of its own, as if it were alone.
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
from numpy.typing import NDArray
from rich.progress import Progress

from bench import report
from bench.model.shapes import SHAPES, check_shape
from bench.model.steps import make_runner, node_budget
from bench.plan import BenchError
from bench.recordings import Line, Recordings, load_encoder, load_resources, load_stream
from outrider.drafters.interface import DraftTree, Ints
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import Resources, make
from outrider.server.settings import Settings
from outrider.verify.cost import CostCurve
from outrider.verify.decode import step
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.model.transfer import Download
from outrider.verify.round import run_round
from outrider.verify.sampling.acceptance import Decision, NodeLogits, Rule, walk
from outrider.verify.sampling.rows import is_on_host
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

IN_TURNS = "in turns"
# A step of each stream, and which of them have ended.
Advance = Callable[[Sequence[Stream]], Iterator[bool]]


class Recorded(Rule):
    """Chooses the tokens of a recorded answer."""

    def __init__(self, answer: Ints) -> None:
        self._answer = answer.tolist()

    def decide(
        self, logits: NodeLogits, tree: DraftTree, first: int, extra: Sequence[Any] = (), together: Any = None
    ) -> Callable[[], Decision]:
        depths = [0, *tree.depths.tolist()]
        on_record = [True]
        for parent, depth, token in zip(tree.parents.tolist(), depths[1:], tree.tokens.tolist(), strict=True):
            on_record.append(on_record[parent + 1] and self._next(first + depth - 1) == token)
        chosen = [self._next(first + depth) if right else -1 for right, depth in zip(on_record, depths, strict=True)]
        if is_on_host(logits):
            return lambda: (*walk(tree, lambda row: _after_greedy_choice(logits[row], chosen[row])), [*extra])
        download = Download(logits[:].argmax(-1).int(), *extra)  # as costly as a greedy choice
        return lambda: (*walk(tree, chosen.__getitem__), download.arrays()[1:])

    def _next(self, position: int) -> int:
        return self._answer[position] if position < len(self._answer) else 0


def _after_greedy_choice(logits: NDArray[np.float32], token: int) -> int:
    """The recorded token, after the work of a greedy choice."""
    logits.argmax(-1)
    return token


def forced_stream(
    runner: TorchRunner, name: DrafterName, resources: Resources, line: Line, max_nodes: int, curve: CostCurve | None
) -> Stream:
    """A stream that reads the prompt of a recorded line and emits its answer, at the cost of greedy decoding."""
    drafter = make(name, resources)
    drafter.feedback = 0
    options = DecodeOptions(SamplingParams(temperature=0), len(line.answer), max_nodes=max_nodes, curve=curve)
    verifier = Verifier(runner, runner.new_cache(), lambda _: Recorded(line.answer))
    return Stream(verifier, drafter, line.prompt, options)


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
    figures = {
        "shape": shape,
        "dtype": str(runner.cache_shape.dtype),
        "stream": recordings.streams[0].name,
        "drafter": drafter,
        "answers": len(lines),
        "results": rates(found),
    }
    columns = {"streams": "streams", "tokens/s": "tokens_per_second:.2f", f"over {IN_TURNS}": "over_turns:.3f"}
    report.print_figures(f"Forced replay of several streams, {drafter}", columns, rates(found))
    if out:
        report.save(out, figures)
    return figures


def context_of(shape: str, settings: Settings) -> int:
    """The context in tokens of random weights of this shape. Raises BenchError for an unknown one."""
    check_shape(shape)
    return settings.model.context_tokens or int(SHAPES[shape]().max_position_embeddings)


def load_replay(recordings: Recordings, options: Options, context: int) -> tuple[list[Line], Resources]:
    """The lines of the first stream that fit the context, and what drafters know of the corpus. Raises BenchError."""
    encoder = load_encoder(recordings.tokenizer)
    lines = load_stream(recordings.streams[0], encoder, recordings.limit)
    fitting = select_fitting(lines, context)
    resources = load_resources(recordings.corpus, encoder, options)
    return fitting, resources


def select_fitting(lines: Sequence[Line], context: int) -> list[Line]:
    """The lines whose answers take less than half of the context, with the ends of their prompts. Raises BenchError."""
    fitting = [line for line in lines if 1 < len(line.answer) < context // 2]
    if not fitting:
        raise BenchError("No recorded answer fits the context; increase --model.context_tokens.")
    return [replace(line, prompt=line.prompt[-(context - len(line.answer) - 1) :]) for line in fitting]


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
