"""`outrider bench pearl`: methods that draft with a model, compared as in GSD's Table 1 and PEARL's Table 3.

All methods answer the same prompts in turns. With `--shape` both models are random weights of known shapes: the costs are
real, and a given share of the draft model's tokens is right.
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

from bench import report
from bench.decode import count_equal, encode
from bench.model.forced import ForcedVerifier
from bench.model.shapes import check_shape, random_runner
from bench.pearl_simulation import Clock, agreement, with_errors
from bench.plan import BenchError, Plan
from outrider.drafters.interface import MAX_NODES, Drafter, DraftTree, Ints, Source, Verdict
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName, DraftTime
from outrider.drafters.registry import Resources, make
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load
from outrider.verify.cost import CostCurve
from outrider.verify.decode import Decoded, decode
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.session import SessionDraft
from outrider.verify.generation import DecodeOptions
from outrider.verify.heads.draft import HeadDraft, HeadRunner
from outrider.verify.model.loading import resolve_devices
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.segment import Segment
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import TreeVerifier

DEFAULT_CONTEXT_TOKENS = 1024
PROMPT_TOKENS = 32  # of a synthetic prompt
SPEED_COLUMNS = {
    "method": "method",
    "speed-up": "speedup:.3f",
    "tokens/s": "tokens_per_second:.2f",
    "tokens\nper step": "tokens_per_step:.3f",
    "same\ntokens": "same_as_plain",
    "both\nbusy": "both_busy:.3f",
}
SPEED_LEGEND = "speed-up, same tokens: against autoregressive; both busy: share of the time in which both models run."
ACCEPTANCE_COLUMNS = {
    "method": "method",
    "accept.": "acceptance:.3f",
    "drafted\n/ answer": "drafted_tokens:.1f",
    "graph\nsuccess": "graph_success:.3f",
    "merged\nshare": "merged_share:.3f",
}
ACCEPTANCE_LEGEND = (
    "accept.: drafted share of the emitted tokens; graph success: share of the steps that "
    "accepted merged nodes; merged share: of the accepted tokens."
)


@dataclass(frozen=True)
class Method:
    """A drafter with its options: a row of the tables."""

    name: str
    drafter: DrafterName
    resources: Callable[[Resources], Resources] = lambda resources: resources


def without(**strategies: Any) -> Callable[[Resources], Resources]:
    """A change of PEARL's options that switches a strategy off."""

    def changed(resources: Resources) -> Resources:
        options = resources.options
        return replace(resources, options=replace(options, pearl=replace(options.pearl, **strategies)))

    return changed


def drafting(time: DraftTime) -> Callable[[Resources], Resources]:
    """A change of fusion's options: when the draft model drafts."""

    def changed(resources: Resources) -> Resources:
        options = resources.options
        return replace(resources, options=replace(options, fusion=replace(options.fusion, draft=time)))

    return changed


MODEL_METHODS = (
    Method("autoregressive", "none"),
    Method("SSD (draft)", "draft"),
    Method("TSD (draft-tree)", "draft-tree"),
    Method("GSD (draft-graph)", "draft-graph"),
    Method("PEARL w/o pre-verify", "pearl", without(pre_verify=False)),
    Method("PEARL w/o post-verify", "pearl", without(post_verify=False)),
    Method("PEARL w/o a table for the draft", "pearl", without(thrifty=False, ahead=0)),
    Method("PEARL", "pearl", without(thrifty=False)),
)
METHODS = (
    *MODEL_METHODS,
    Method("PEARL, thrifty (pearl)", "pearl"),
    Method("fusion", "fusion", drafting("never")),
    Method("fusion, drafting before", "fusion", drafting("before")),
    Method("fusion, drafting beside", "fusion", drafting("beside")),
    Method("fusion with the draft model", "fusion", drafting("auto")),
)


@dataclass
class Row:
    """One method at one temperature, over all repeats."""

    tokens_per_second: list[float] = field(default_factory=list)  # one per repeat
    tokens: int = 0
    accepted: int = 0
    steps: int = 0
    merged_steps: int = 0  # steps that accepted merged nodes
    merged_tokens: int = 0
    drafted: int = 0
    answers: int = 0
    busy: list[dict[str, float]] = field(default_factory=list)  # shares of the time; one per repeat
    last: list[list[int]] = field(default_factory=list)  # token ids; of the last repeat

    def add(self, decoded: Decoded, drafted: int) -> None:
        """Adds one answer."""
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
        """The figures of the papers' tables; `plain` is decoding without drafts."""
        rate = statistics.median(self.tokens_per_second)
        pairs = zip(self.tokens_per_second, plain.tokens_per_second, strict=True)
        busy = {name: round(statistics.median(shares[name] for shares in self.busy), 3) for name in self.busy[0]}
        return {
            "speedup": round(statistics.median(own / baseline for own, baseline in pairs), 3),
            "tokens_per_second": round(rate, 2),
            "tokens_per_step": round(self.tokens / self.steps, 3),
            "acceptance": round(self.accepted / self.tokens, 3),  # drafted share of the emitted tokens
            "drafted_tokens": round(self.drafted / self.answers, 1),  # per answer
            "graph_success": round(self.merged_steps / self.steps, 3),  # steps that accepted merged nodes
            "merged_share": round(self.merged_tokens / max(1, self.accepted), 3),  # of the accepted tokens
            "same_as_plain": count_equal(plain.last, self.last),
            **busy,
        }


class TimedVerifier(TreeVerifier):
    """A TreeVerifier that records its steps on the clock."""

    clock = Clock()
    _began = 0.0

    def segment(self, tree: DraftTree) -> Segment:
        self._began = time.perf_counter()
        return super().segment(tree)

    def judge(self, *arguments: Any) -> Verdict:
        verdict = super().judge(*arguments)
        self.clock.spans["verify"].append((self._began, time.perf_counter()))
        return verdict


class TimedDraft(SessionDraft):
    """A draft model that records its forwards on the clock."""

    clock = Clock()

    def root(self, count: int) -> Candidates:
        return self.clock.spend("draft", lambda: super(TimedDraft, self).root(count))

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        return self.clock.spend("draft", lambda: super(TimedDraft, self).expand(tokens, parents, count))


class TimedHead(TimedDraft, HeadDraft):
    """A draft head that records its forwards on the clock."""


class SyntheticDraft(TimedDraft):
    """A draft model that runs its forwards but proposes given tokens."""

    guesses = np.empty(0, np.int32)  # int32 [answer]
    rate = 0.5  # share of `guesses` that are right

    def _candidates(self, logits: torch.Tensor, depths: Collection[int], count: int) -> Candidates:
        candidates = super()._candidates(logits, depths, count)
        first = self._length - self._text.prompt_length
        positions = np.minimum(np.array(list(depths)) + first, len(self.guesses) - 1)
        tokens = candidates.tokens.copy()
        shares = np.full_like(candidates.probability, (1 - self.rate) / max(1, count - 1))
        tokens[:, 0], shares[:, 0] = self.guesses[positions], self.rate
        return Candidates(tokens, shares)


@dataclass(frozen=True)
class Pair:
    """A target and a draft model, and how answers are decoded with them."""

    runner: ModelRunner
    resources: Resources
    stop_ids: frozenset[int]
    prompts: Sequence[Ints]
    curve: CostCurve | None
    verifier: Callable[[], TreeVerifier]
    methods: Sequence[Method] = METHODS


def run(settings: Settings, plan: Plan, out: Path | None) -> dict[str, Any]:
    """Measures the models of the settings. Raises BenchError if they have no draft model."""
    if settings.draft_model.path is None:
        raise BenchError("Give a draft model with --draft-model, or two shapes with --shape and --draft-shape.")
    runtime = load(settings)
    assert runtime.resources.model is not None
    shared: DraftRunner = runtime.resources.model.__self__  # type: ignore[attr-defined]
    pair = Pair(
        runner=runtime.runner,
        resources=replace(
            runtime.resources, model=lambda: (TimedHead if isinstance(shared, HeadRunner) else TimedDraft)(shared)
        ),
        stop_ids=runtime.stop_ids,
        prompts=[encode(runtime, prompt) for prompt in plan.prompts],
        curve=runtime.curve,
        verifier=lambda: TimedVerifier(runtime.runner, runtime.runner.new_cache()),
    )
    names = {"model": settings.model.served_name, "draft_model": Path(settings.draft_model.path).name}
    return measure(pair, plan, names | {"speed_ratio": round(shared.speed_ratio, 2)}, out)


def run_shapes(settings: Settings, plan: Plan, shapes: tuple[str, str], rate: float, out: Path | None) -> dict[str, Any]:
    """Measures random weights of two shapes; a share `rate` of the draft model's tokens is right. Raises BenchError."""
    for shape in shapes:
        check_shape(shape)
    dtype = getattr(torch, "bfloat16" if settings.model.dtype == "auto" else settings.model.dtype)
    context = settings.model.context_tokens or DEFAULT_CONTEXT_TOKENS
    target, draft = (random_runner(shape, dtype, settings.model.device, context) for shape in shapes)
    shared = DraftRunner(draft, target.vocabulary, threads=settings.draft_model.threads)
    shared.measure(target)
    pair = synthetic_pair(settings, plan, target, shared, rate)
    names = {
        "shape": shapes[0],
        "draft_shape": shapes[1],
        "acceptance_rate": rate,
        "dtype": str(dtype),
        "device": ", ".join(map(str, resolve_devices(settings.model.device))),
        "speed_ratio": round(shared.speed_ratio, 2),
    }
    return measure(pair, plan, names, out)


def synthetic_pair(settings: Settings, plan: Plan, target: ModelRunner, draft: DraftRunner, rate: float) -> Pair:
    """Two models and a synthetic answer; a share `rate` of the draft model's tokens is right."""
    answer = 2 * np.random.default_rng(0).integers(0, 10_000, plan.max_tokens + MAX_NODES).astype(np.int32)

    class Synthetic(SyntheticDraft):
        pass

    class Verifier(TimedVerifier, ForcedVerifier):
        pass

    Synthetic.guesses, Synthetic.rate = with_errors(answer, agreement(rate, len(answer), 0)), rate
    return Pair(
        runner=target,
        resources=Resources(settings.speculation.options, model=lambda: Synthetic(draft)),
        stop_ids=frozenset(),
        prompts=[np.arange(PROMPT_TOKENS, dtype=np.int32)] * len(plan.prompts),
        curve=None,
        verifier=lambda: Verifier(target, answer),
        methods=MODEL_METHODS,  # tables learn nothing from a random answer
    )


def measure(pair: Pair, plan: Plan, names: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Measures all methods in turns; prints, and saves the figures if `out` is given."""
    rows = {(t, method): Row() for t in plan.temperatures for method in pair.methods}
    with Progress() as progress:
        task = progress.add_task("decoding", total=(plan.repeats + 1) * len(rows))
        for repeat in range(plan.repeats + 1):
            for (temperature, method), row in rows.items():
                measure_round(pair, plan, temperature, method, row if repeat else Row())  # the first round warms up
                progress.advance(task)
    plain = {t: rows[t, pair.methods[0]] for t in plan.temperatures}
    results = [{"temperature": t, "method": method.name, **row.figures(plain[t])} for (t, method), row in rows.items()]
    figures = {**names, "prompts": len(pair.prompts), "max_tokens": plan.max_tokens, "results": results}
    show(results)
    Console(highlight=False).print(speed_ratio_note(names["speed_ratio"]))
    if out:
        report.save(out, figures)
    return figures


def speed_ratio_note(ratio: float) -> str:
    """The speed ratio in a sentence, with its consequence if the draft model is too slow."""
    note = f"The draft model is {ratio:.2f} times as fast as the target."
    if round(ratio) > 1:
        return note
    return (
        f"{note} Drafting a token takes as long as decoding one, so PEARL's window is one token, which pre-verify checks: "
        "no draft is left to verify. The other methods hardly draft. Choose a smaller draft model."
    )


def measure_round(pair: Pair, plan: Plan, temperature: float, method: Method, row: Row) -> None:
    """Runs one method once over all prompts."""
    clock = TimedVerifier.clock = TimedDraft.clock = Clock()
    resources = method.resources(pair.resources)
    row.last, started = [], time.perf_counter()
    for number, prompt in enumerate(pair.prompts):
        drafter: Drafter = NoDrafter() if method.drafter == "none" else make(method.drafter, resources)
        params = SamplingParams(temperature=temperature, seed=plan.seed + number)
        options = DecodeOptions(params, plan.max_tokens, pair.stop_ids, MAX_NODES, pair.curve)
        decoded = decode(pair.verifier(), drafter, prompt, options)
        row.add(decoded, getattr(drafter, "drafted_tokens", 0))
        row.last.append(decoded.tokens)
    seconds = time.perf_counter() - started
    row.tokens_per_second.append(sum(map(len, row.last)) / seconds)
    row.busy.append(clock.shares(seconds))


def show(results: Sequence[dict[str, Any]]) -> None:
    """Prints two tables per temperature: speed, and acceptance."""
    for temperature in dict.fromkeys(row["temperature"] for row in results):
        selected = [row for row in results if row["temperature"] == temperature]
        report.print_figures(f"Speed at temperature {temperature}", SPEED_COLUMNS, selected, SPEED_LEGEND)
        report.print_figures(f"Acceptance at temperature {temperature}", ACCEPTANCE_COLUMNS, selected, ACCEPTANCE_LEGEND)
