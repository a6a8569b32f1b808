"""`outrider bench pearl`: what a draft model brings on a real pair of models, in the form of GSD's Table 1 and PEARL's Table 3.

All methods answer the same prompts in turns. With `--shape` both models are random weights of known shapes: the costs are
real, and the draft model is right at a given share of the positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from bench.decode import BenchError, Plan, encode
from bench.model.forced import ForcedVerifier
from bench.model.shapes import SHAPES, random_runner
from bench.pearl import WRONG, Clock, agreement
from drafters.interface import MAX_NODES, Drafter, Ints, Source, Verdict
from drafters.model.language_model import Candidates
from drafters.none import NoDrafter
from drafters.options import DrafterName
from drafters.registry import Resources, make
from server.settings import Settings
from server.worker.runtime import load
from verify.cost import CostCurve
from verify.decode import Decoded, DecodeOptions, decode
from verify.draft_model import DraftRunner, SessionDraft
from verify.model.loading import resolve_device
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    drafter: DrafterName
    resources: Callable[[Resources], Resources] = lambda resources: resources


def without(**strategies: Any) -> Callable[[Resources], Resources]:
    """PEARL with something switched off."""

    def changed(resources: Resources) -> Resources:
        options = resources.options
        return replace(resources, options=replace(options, pearl=replace(options.pearl, **strategies)))

    return changed


MODEL_METHODS = (
    Method("autoregressive", "none"),
    Method("SSD (draft)", "draft"),
    Method("TSD (draft-tree)", "draft-tree"),
    Method("GSD (draft-graph)", "draft-graph"),
    Method("PEARL w/o pre-verify", "pearl", without(pre_verify=False)),
    Method("PEARL w/o post-verify", "pearl", without(post_verify=False)),
    Method("PEARL w/o a table for the draft", "pearl", without(ahead=0)),
    Method("PEARL", "pearl"),
)
METHODS = (
    *MODEL_METHODS,
    Method("fusion", "fusion", lambda resources: replace(resources, model=None)),
    Method("fusion with the draft model", "fusion"),
)


@dataclass
class Row:
    """What a method did, over all repeats."""

    tokens_per_second: list[float] = field(default_factory=list)
    tokens: int = 0
    accepted: int = 0
    steps: int = 0
    merged_steps: int = 0  # whose accepted tokens include copies
    merged_tokens: int = 0
    drafted: int = 0
    answers: int = 0
    busy: list[dict[str, float]] = field(default_factory=list)
    last: list[list[int]] = field(default_factory=list)

    def add(self, decoded: Decoded, drafted: int) -> None:
        """One answer."""
        self.answers += 1
        self.tokens += len(decoded.tokens)
        self.steps += len(decoded.steps)
        self.drafted += drafted
        for step in decoded.steps:
            assert step.tree is not None
            merged = int((step.tree.source[step.accepted] == Source.MERGED).sum())
            self.accepted += len(step.accepted)
            self.merged_tokens += merged
            self.merged_steps += merged > 0

    def figures(self, plain: Row) -> dict[str, Any]:
        """As the papers have them."""
        rate = statistics.median(self.tokens_per_second)
        pairs = zip(self.tokens_per_second, plain.tokens_per_second, strict=True)
        shares = {name: round(statistics.median(each[name] for each in self.busy), 3) for name in self.busy[0]}
        return {
            "speedup": round(statistics.median(mine / theirs for mine, theirs in pairs), 3),
            "tokens_per_second": round(rate, 2),
            "tokens_per_step": round(self.tokens / self.steps, 3),
            "acceptance": round(self.accepted / self.tokens, 3),  # of the emitted tokens, those that were drafted
            "drafted_tokens": round(self.drafted / self.answers, 1),  # per answer
            "graph_success": round(self.merged_steps / self.steps, 3),  # steps that accepted merged nodes
            "merged_share": round(self.merged_tokens / max(1, self.accepted), 3),  # of the accepted tokens
            "same_as_plain": f"{sum(a == b for a, b in zip(self.last, plain.last, strict=True))}/{len(self.last)}",
            **shares,
        }


class TimedVerifier(TreeVerifier):
    """A TreeVerifier whose steps go on the clock."""

    clock = Clock()

    def verify(self, *arguments: Any) -> Verdict:
        return self.clock.spend("verify", lambda: super(TimedVerifier, self).verify(*arguments))


class TimedDraft(SessionDraft):
    """A draft model whose forwards go on the clock."""

    clock = Clock()

    def root(self, count: int) -> Candidates:
        return self.clock.spend("draft", lambda: super(TimedDraft, self).root(count))

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        return self.clock.spend("draft", lambda: super(TimedDraft, self).expand(tokens, parents, count))


class SyntheticDraft(TimedDraft):
    """Real forwards, their outcome replaced: the recorded answer where the model is to be right, a wrong token elsewhere."""

    guesses = np.empty(0, np.int32)
    rate = 0.5

    def _candidates(self, logits: torch.Tensor, depths: Collection[int], count: int) -> Candidates:
        found = super()._candidates(logits, depths, count)
        first = self._length - self._text.prompt_length
        at = np.minimum(np.array(list(depths)) + first, len(self.guesses) - 1)
        tokens, shares = found.tokens.copy(), np.full_like(found.probability, (1 - self.rate) / max(1, count - 1))
        tokens[:, 0], shares[:, 0] = self.guesses[at], self.rate
        return Candidates(tokens, shares)


@dataclass(frozen=True)
class Pair:
    """Two models, and how an answer is decoded with them."""

    runner: ModelRunner
    resources: Resources
    stop_ids: frozenset[int]
    prompts: Sequence[Ints]
    curve: CostCurve | None
    verifier: Callable[[], TreeVerifier]
    methods: Sequence[Method] = METHODS


def run(settings: Settings, plan: Plan, out: Path | None) -> dict[str, Any]:
    """A real pair. Raises BenchError where no draft model is named."""
    if settings.draft_model.path is None:
        raise BenchError("Name a draft model with --draft-model, or two shapes with --shape and --draft-shape.")
    loaded = load(settings)
    assert loaded.resources.model is not None
    shared: DraftRunner = loaded.resources.model.__self__  # type: ignore[attr-defined]
    pair = Pair(
        loaded.runner,
        replace(loaded.resources, model=lambda: TimedDraft(shared)),
        loaded.stop_ids,
        [encode(loaded, prompt) for prompt in plan.prompts],
        loaded.curve,
        lambda: TimedVerifier(loaded.runner, loaded.runner.new_cache()),
    )
    names = {"model": settings.model.served_name, "draft_model": Path(settings.draft_model.path).name}
    return measure(pair, plan, names | {"speed_ratio": round(shared.speed_ratio, 2)}, out)


def run_shapes(settings: Settings, plan: Plan, shapes: tuple[str, str], rate: float, out: Path | None) -> dict[str, Any]:
    """Random weights of two shapes, the draft model right at a share `rate` of the positions. Raises BenchError."""
    for shape in shapes:
        if shape not in SHAPES:
            raise BenchError(f"There is no shape {shape!r}; there are {', '.join(SHAPES)}.")
    dtype = getattr(torch, "bfloat16" if settings.model.dtype == "auto" else settings.model.dtype)
    context = settings.model.context_tokens or 1024
    threads = settings.draft_model.threads
    target, draft = (random_runner(shape, dtype, settings.model.device, context) for shape in shapes)
    shared = DraftRunner(draft, target.vocabulary, threads=threads)
    shared.measure(target)
    answer = 2 * np.random.default_rng(0).integers(0, 10_000, plan.max_tokens + MAX_NODES).astype(np.int32)
    guesses = np.where(agreement(rate, len(answer), 0), answer, answer + WRONG).astype(np.int32)

    class Synthetic(SyntheticDraft):
        pass

    class Verifier(TimedVerifier, ForcedVerifier):
        pass

    Synthetic.guesses, Synthetic.rate = guesses, rate
    pair = Pair(
        target,
        Resources(settings.speculation.options, model=lambda: Synthetic(shared)),
        frozenset(),
        [np.arange(32, dtype=np.int32)] * len(plan.prompts),
        None,
        lambda: Verifier(target, answer),
        MODEL_METHODS,  # the answer is noise to tables
    )
    names = {"shape": shapes[0], "draft_shape": shapes[1], "acceptance_rate": rate, "dtype": str(dtype)}
    device = str(resolve_device(settings.model.device))
    return measure(pair, plan, names | {"device": device, "speed_ratio": round(shared.speed_ratio, 2)}, out)


def measure(pair: Pair, plan: Plan, names: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """All methods in turns; prints and saves."""
    rows = {(t, method): Row() for t in plan.temperatures for method in pair.methods}
    with Progress() as progress:
        task = progress.add_task("decoding", total=(plan.repeats + 1) * len(rows))
        for repeat in range(plan.repeats + 1):
            for (temperature, method), row in rows.items():
                turn(pair, plan, temperature, method, row if repeat else Row())  # the first round warms up
                progress.advance(task)
    plain = {t: rows[t, pair.methods[0]] for t in plan.temperatures}
    results = [{"temperature": t, "method": method.name, **row.figures(plain[t])} for (t, method), row in rows.items()]
    figures = {**names, "prompts": len(pair.prompts), "max_tokens": plan.max_tokens, "results": results}
    table = Table(*(name.replace("_", " ") for name in results[0]))
    for result in results:
        table.add_row(*map(str, result.values()))
    Console().print(table)
    if out:
        report.save(out, figures)
    return figures


def turn(pair: Pair, plan: Plan, temperature: float, method: Method, row: Row) -> None:
    """One repeat of one method over all prompts."""
    clock = TimedVerifier.clock = TimedDraft.clock = Clock()
    resources = method.resources(pair.resources)
    row.last, tokens, started = [], 0, time.perf_counter()
    for number, prompt in enumerate(pair.prompts):
        drafter: Drafter = NoDrafter() if method.drafter == "none" else make(method.drafter, resources)
        params = SamplingParams(temperature=temperature, seed=plan.seed + number)
        options = DecodeOptions(params, plan.max_tokens, pair.stop_ids, MAX_NODES, pair.curve)
        decoded = decode(pair.verifier(), drafter, prompt, options)
        row.add(decoded, getattr(drafter, "drafted_tokens", 0))
        row.last.append(decoded.tokens)
        tokens += len(decoded.tokens)
    seconds = time.perf_counter() - started
    row.tokens_per_second.append(tokens / seconds)
    row.busy.append(clock.shares(seconds))
