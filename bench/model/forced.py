"""`outrider bench decode --shape --forced`: real forwards of random weights that emit a recorded answer.

The costs are those of this machine, the acceptance is that of the model that wrote the answer. Logits of random weights are
meaningless, so drafters get no feedback.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from bench import report
from bench.decode import Tally, peak_memory_mb
from bench.model.bandwidth import read_bytes_per_second
from bench.model.steps import make_runner
from bench.plan import BenchError
from bench.recordings import Line, Recordings, load_encoder, load_resources, load_stream
from outrider.drafters.interface import MAX_NODES, Drafter, DraftTree, Ints
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, make, warm
from outrider.server.settings import Settings
from outrider.verify.acceptance import NodeLogits, walk
from outrider.verify.cost import CostCurve
from outrider.verify.decode import Decoded, decode
from outrider.verify.generation import DecodeOptions
from outrider.verify.measurement import measure
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.transfer import to_host
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import TreeVerifier

DEFAULT_CONTEXT_TOKENS = 4096


class Recorded:
    """Chooses the tokens of a recorded answer. Implements `outrider.verify.acceptance.Rule`."""

    def __init__(self, answer: Ints) -> None:
        self._answer = answer.tolist()

    def decide(
        self, logits: NodeLogits, tree: DraftTree, first: int, extra: Sequence[torch.Tensor] = ()
    ) -> tuple[Ints, Ints, list[Any]]:
        depths = [0, *tree.depths.tolist()]
        on_record = [True]
        for parent, depth, token in zip(tree.parents.tolist(), depths[1:], tree.tokens.tolist(), strict=True):
            on_record.append(on_record[parent + 1] and self._next(first + depth - 1) == token)
        chosen = [self._next(first + depth) if right else -1 for right, depth in zip(on_record, depths, strict=True)]
        if logits.device.type == "cpu":
            return *walk(tree, lambda row: _after_greedy_choice(logits[row], chosen[row])), to_host(*extra)
        _, *others = to_host(logits[:].argmax(-1).int(), *extra)  # as costly as a greedy choice
        return *walk(tree, chosen.__getitem__), others

    def _next(self, position: int) -> int:
        return self._answer[position] if position < len(self._answer) else 0


def _after_greedy_choice(logits: torch.Tensor, token: int) -> int:
    """The recorded token, after the work of a greedy choice."""
    logits.max(-1)
    return token


class ForcedVerifier(TreeVerifier):
    """A TreeVerifier that emits a recorded answer."""

    def __init__(self, runner: ModelRunner, answer: Ints) -> None:
        super().__init__(runner, runner.new_cache())
        self._answer = answer

    def begin(
        self, prompt: Ints, params: SamplingParams, max_tokens: int, stop_ids: Collection[int] = (), scores: bool = False
    ) -> int:
        reused = super().begin(prompt, params, max_tokens, stop_ids, scores)
        self._rule = Recorded(self._answer)
        return reused


def forced_answer(
    runner: ModelRunner, name: DrafterName, resources: Resources, line: Line, max_nodes: int, curve: CostCurve | None
) -> Decoded:
    """Reads the prompt of a recorded line and emits its answer."""
    drafter: Drafter = NoDrafter() if name == "none" else make(name, resources)
    drafter.feedback = 0
    options = DecodeOptions(SamplingParams(temperature=0), len(line.answer), max_nodes=max_nodes, curve=curve)
    prompt = line.prompt[-(runner.context_tokens - len(line.answer) - 1) :]
    decoded = decode(ForcedVerifier(runner, line.answer), drafter, prompt, options)
    assert np.array_equal(decoded.tokens, line.answer)
    return decoded


def run_forced(
    shape: str, settings: Settings, recordings: Recordings, drafters: Sequence[DrafterName], repeats: int, out: Path | None
) -> dict[str, Any]:
    """Decodes the first stream of `recordings`, drafters in turns; prints, and saves if `out` is given. Raises BenchError."""
    stream = recordings.streams[0]
    encoder = load_encoder(recordings.tokenizer)
    lines, _ = load_stream(stream, encoder, recordings.limit)
    lines = select_fitting(lines, settings.model.context_tokens or DEFAULT_CONTEXT_TOKENS)
    resources = load_resources(recordings.corpus, encoder, settings.speculation.options)
    warm(resources)
    runner = make_runner(shape, settings)
    nodes = settings.speculation.max_nodes
    max_nodes, curve = (MAX_NODES, measure(runner)) if nodes == "auto" else (nodes, None)
    tallies = {name: Tally() for name in drafters}
    with Progress() as progress:
        task = progress.add_task("decoding", total=repeats * len(drafters) * len(lines))
        for _ in range(repeats):
            for name, tally in tallies.items():
                answers, started = [], time.perf_counter()
                for line in lines:
                    answers.append(forced_answer(runner, name, resources, line, max_nodes, curve))
                    progress.advance(task)
                tally.add(answers, time.perf_counter() - started)
    figures: dict[str, Any] = {
        "shape": shape,
        "dtype": str(runner.cache_shape.dtype),
        "weight_bits": runner.weight_bits,
        "kv_dtype": str(runner.cache_shape.stored_dtype),
        "stream": stream.name,
        "answers": len(lines),
        "max_nodes": nodes,
        "peak_memory_mb": peak_memory_mb(),
        "results": collect(tallies, runner, drafters[0]),
    }
    show(figures["results"], drafters[0])
    if out:
        report.save(out, figures)
    return figures


def select_fitting(lines: Sequence[Line], context: int) -> list[Line]:
    """The lines whose answers take less than half of the context. Raises BenchError if there are none."""
    selected = [line for line in lines if 1 < len(line.answer) < context // 2]
    if not selected:
        raise BenchError("No recorded answer fits the context; increase --model.context_tokens.")
    return selected


def collect(tallies: dict[DrafterName, Tally], runner: ModelRunner, first: DrafterName) -> list[dict[str, Any]]:
    """The figures of every drafter, and its speed relative to the first one's."""
    weight_bytes, bandwidth = runner.weight_bytes, read_bytes_per_second(runner)
    baseline = statistics.median(tallies[first].tokens_per_second)
    return [
        {
            "drafter": name,
            **tally.figures(weight_bytes, bandwidth),
            f"times_{first}": round(statistics.median(tally.tokens_per_second) / baseline, 3),
        }
        for name, tally in tallies.items()
    ]


def show(rows: Sequence[dict[str, Any]], first: DrafterName) -> None:
    """Prints the speed of every drafter."""
    columns = {
        "drafter": "drafter",
        "tokens/s": "tokens_per_second:.2f",
        "tokens\nper step": "tokens_per_step:.3f",
        "draft ms\nper step": "draft_ms_per_step:.3f",
        "verify ms\nper step": "verify_ms_per_step:.3f",
        f"speed over\n{first}": f"times_{first}:.3f",
    }
    report.print_figures("Forced replay", columns, rows)
