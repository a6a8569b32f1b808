"""`outrider bench decode --forced --streams`: several recorded answers at once, in shared rounds and in turns.

Forced replay: forwards of the model emit recorded answers. The costs are those of the model on this machine, the acceptance is
that of the model that wrote the answers. The logits are of other answers, so drafters get no feedback. In turns, each stream
has a forward of its own, as if it were alone.
"""

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
from bench.plan import BenchError
from bench.recordings import Line, load_stream
from outrider.drafters.interface import DraftTree, Ints
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import Resources, make
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load
from outrider.verify.cost import CostCurve
from outrider.verify.decode import step
from outrider.verify.model.runner import ModelRunner
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
    runner: ModelRunner, name: DrafterName, resources: Resources, line: Line, max_nodes: int, curve: CostCurve | None
) -> Stream:
    """A stream that reads the prompt of a recorded line and emits its answer, at the cost of greedy decoding."""
    drafter = make(name, resources)
    drafter.feedback = 0
    options = DecodeOptions(SamplingParams(temperature=0), len(line.answer), max_nodes=max_nodes, curve=curve)
    verifier = Verifier(runner, runner.new_cache(), lambda _: Recorded(line.answer))
    return Stream(verifier, drafter, line.prompt, options)


def run_streams(
    settings: Settings,
    options: Options,
    recording: Path,
    drafter: DrafterName,
    counts: Sequence[int],
    limit: int | None,
    max_tokens: int,
    repeats: int,
    out: Path | None,
) -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given. Answers are cut to `max_tokens`. Raises BenchError."""
    runtime = load(settings)
    resources = replace(runtime.resources, options=options)
    lines = load_stream(recording, runtime.tokenizer, limit)
    lines = select_fitting(lines, runtime.runner.context_tokens)
    lines = [replace(line, answer=line.answer[:max_tokens]) for line in lines]
    budget = runtime.budget(settings.speculation.max_nodes)
    gc.freeze()  # as the worker does: collections would delay rounds

    def start(line: Line) -> Stream:
        return forced_stream(runtime.runner, drafter, resources, line, *budget)

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
        "model": settings.model.served_name,
        "dtype": runtime.runner.dtypes[0],
        "stream": recording.name,
        "drafter": drafter,
        "answers": len(lines),
        "results": rates(found),
    }
    columns = {"streams": "streams", "tokens/s": "tokens_per_second:.2f", f"over {IN_TURNS}": "over_turns:.3f"}
    report.print_figures(f"Forced replay of several streams, {drafter}", columns, rates(found))
    if out:
        report.save(out, figures)
    return figures


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


def tokens_per_second(lines: Sequence[Line], start: Callable[[Line], Stream], streams: int, advance: Advance) -> float:
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
