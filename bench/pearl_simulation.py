"""`outrider bench pearl --simulate`: PEARL's loop over two models that only sleep, compared with theory.

A draft token is accepted with probability a, independently, and the window is g = c tokens, so drafting a window and one
verification take the same time T. A pre-verify step emits one token; its first guess is right with probability a. A
post-verify step verifies the g - 1 remaining guesses: it emits 1 + a + ... + a^(g-1) tokens, and all of them and the next
guess are right with probability a^g. So a share p = a / (1 + a - a^g) of the steps is post-verify, and the ideal timeline
emits (1 - p) + p (1 - a^g) / (1 - a) tokens per T.

Between two rejections k tokens are accepted with probability (1 - a) a^k, a / (1 - a) on average: the sum in the proof of the
paper's Theorem 2. The theorem evaluates it to 1 / (1 - a) and adds one for the target's own token; the correct value is
a / (1 - a) + 1 = 1 / (1 - a), which is compared here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from bench import report
from outrider.drafters.interface import NOTHING, Drafter, DraftTree, Ints, Logprobs, Sampling, Source, Verdict, chain
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.language_model import Candidates, LanguageModel
from outrider.drafters.model.schedule import Schedules
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.options import DraftOptions, DraftTime, PearlOptions
from outrider.drafters.pearl import PearlDrafter
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import Stateless
from outrider.verify.acceptance import walk
from outrider.verify.decode import finish
from outrider.verify.generation import DecodeOptions, Generation
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.segment import Segment
from outrider.verify.sampling_params import SamplingParams

T = TypeVar("T")
RATIOS = (3, 5, 8)  # c
RATES = (0.5, 0.7, 0.9)  # a
SHAPE = CacheShape.uniform(1, 1, 1, torch.float32, torch.device("cpu"))
NO_ROWS = Segment(KVCache(SHAPE, 1), ForwardBatch.chain(torch.zeros(1)))
RUN = 8  # tokens that the simulated tables know, and then do not know
FUSION_COLUMNS = {
    "c": "c",
    "a": "alpha",
    **{name: f"{name}:.2f" for name in ("pearl", "fusion", "before", "beside", "auto")},
}
FUSION_LEGEND = "fusion: tables alone; before, beside, auto: when the draft model drafts (speculation.fusion.draft)."
WRONG = 1  # added to a token, to be rejected


def ideal_tokens_per_step(rate: float, window: int) -> float:
    """Expected tokens per verification of the ideal timeline."""
    post = rate / (1 + rate - rate**window)
    return (1 - post) + post * (1 - rate**window) / (1 - rate)


def ideal_steps(right: NDArray[np.bool_], tokens: int, window: int) -> int:
    """Verifications that the ideal timeline needs for `tokens` tokens; `right`: which guesses are right, bool [>= tokens]."""
    position, steps, post_verify = 0, 0, False
    while position < tokens:
        steps += 1
        size = window - 1 if post_verify else 0
        wrong = np.flatnonzero(~right[position : position + size + 1])
        post_verify = not len(wrong)  # all guesses are right, and the next one too
        position += size + 1 if post_verify else int(wrong[0]) + 1
    return steps


def agreement(rate: float, tokens: int, seed: int) -> NDArray[np.bool_]:
    """Where the draft model is right, bool [tokens]: exactly a share `rate` of the positions, in random order."""
    right = np.arange(tokens) < round(rate * tokens)
    np.random.default_rng(seed).shuffle(right)
    return right


def with_errors(answer: Ints, right: NDArray[np.bool_]) -> Ints:
    """`answer` with wrong tokens wherever `right` is false, int32 [tokens]. All tokens of `answer` must be even."""
    return np.where(right, answer, answer + WRONG).astype(np.int32)


@dataclass
class Clock:
    """Records when each of the two models is busy."""

    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"draft": [], "verify": []})

    def spend(self, model: str, work: Callable[[], T]) -> T:
        """Runs `work`, records its time and returns its result."""
        started = time.perf_counter()
        result = work()
        self.spans[model].append((started, time.perf_counter()))
        return result

    def shares(self, seconds: float) -> dict[str, float]:
        """Shares of `seconds` in which each model and both models were busy."""
        busy = {model: sum(stop - start for start, stop in spans) for model, spans in self.spans.items()}
        busy["both"] = self._overlap()
        return {f"{model}_busy": round(busy_seconds / seconds, 3) for model, busy_seconds in busy.items()}

    def _overlap(self) -> float:
        """Seconds in which both models were busy. Both lists are in order of time."""
        total, first = 0.0, 0
        verifications = self.spans["verify"]
        for start, stop in self.spans["draft"]:
            while first < len(verifications) and verifications[first][1] <= start:
                first += 1
            index = first
            while index < len(verifications) and verifications[index][0] < stop:
                total += min(stop, verifications[index][1]) - max(start, verifications[index][0])
                index += 1
        return total


class SleepingModel:
    """A draft model that sleeps for each forward and returns given guesses. Implements `LanguageModel`."""

    vocabulary = 1 << 18

    def __init__(self, guesses: Ints, seconds: float, ratio: float, clock: Clock) -> None:
        self._guesses = guesses
        self._seconds = seconds
        self._clock = clock
        self.speed_ratio = ratio
        self._emitted = 0
        self._rows = 0  # drafted rows, the root not counted
        self._thread = ThreadPoolExecutor(1)

    def begin(self, text: Sequence, sampling: Sampling | None = None) -> None:
        self._emitted, self._rows = text.emitted, 0  # a request may begin after its first tokens

    @property
    def space(self) -> int:
        return len(self._guesses) - self._emitted - self._rows - 1

    def root(self, count: int) -> Candidates:
        self._rows = 0
        return self._forward(1)

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        self._rows += len(tokens)
        return self._forward(len(tokens))

    def retract(self, rows: int) -> None:
        self._rows = rows - 1

    def advance(self, tokens: Ints) -> None:
        self._emitted += len(tokens)
        self._rows = max(0, self._rows - len(tokens))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def _forward(self, rows: int) -> Candidates:
        self._clock.spend("draft", lambda: time.sleep(self._seconds))
        end = self._emitted + self._rows + 1
        return Candidates(self._guesses[end - rows : end, None], np.full((rows, 1), 0.5, np.float32))


class KnownRuns(Stateless):
    """Tables that know the answer in runs of RUN tokens, of which every second one, and nothing else. Implements `Drafter`."""

    feedback = 0
    prunable = True

    def __init__(self, answer: Ints) -> None:
        self._answer = answer
        self._sequence = Sequence()

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._sequence = sequence

    def propose(self, budget: int) -> DraftTree:
        at = self._sequence.emitted
        known = RUN - at % RUN if at // RUN % 2 else 0
        tokens = self._answer[at : at + min(known, budget)]
        return chain(tokens, np.cumprod(np.full(len(tokens), 0.9)).astype(np.float32), Source.LOOKUP)

    def observe(self, verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass


class SleepingVerifier:
    """A target that sleeps for each step and emits a given answer. Implements `outrider.verify.verifier.Verifier`."""

    context_tokens = draft_depth = 1 << 30
    prompt_logprobs: Logprobs | None = None

    def __init__(self, answer: Ints, seconds: float, clock: Clock) -> None:
        self.sequence = Sequence()
        self._answer = answer
        self._seconds = seconds
        self._clock = clock

    def begin(
        self, prompt: Ints, params: SamplingParams, max_tokens: int, stop_ids: Collection[int] = (), scores: bool = False
    ) -> int:
        self.sequence.begin(prompt, max_tokens, stop_ids)
        return 0

    unread = 0

    @property
    def runner(self) -> SleepingVerifier:
        return self

    def chunk(self, tokens: int = 0) -> Segment | None:
        return None

    def read(self, chunk: Segment, logits: torch.Tensor) -> None:
        pass

    def segment(self, tree: DraftTree) -> Segment:
        return NO_ROWS

    def forward_all(self, segments: Sized) -> list[torch.Tensor]:
        self._clock.spend("verify", lambda: time.sleep(self._seconds))
        return [torch.empty(0)] * len(segments)

    def judge(
        self, tree: DraftTree, logits: torch.Tensor, feedback: int = 0, allowed: NDArray[np.bool_] | None = None
    ) -> Verdict:
        choices = self._answer[self.sequence.emitted :][[0, *tree.depths.tolist()]]
        rows, tokens = walk(tree, choices.tolist().__getitem__)
        return Verdict(tree, rows, tokens)

    def commit(self, verdict: Verdict) -> None:
        self.sequence.append(verdict.tokens)

    def truncate(self, length: int) -> None:
        self.sequence.truncate(length)


def run_loop(
    make: Callable[[LanguageModel, Ints], Drafter], ratio: int, rate: float, tokens: int, token_seconds: float, nodes: int
) -> tuple[Drafter, NDArray[np.bool_], float, Clock]:
    """Decodes a random answer. Returns the drafter, which of the model's guesses are right, the seconds, and the busy times."""
    clock, margin = Clock(), 2 * max(nodes, ratio) + 2  # positions that may be drafted but not reached
    answer = 2 * np.random.default_rng(1).integers(0, 1000, tokens + margin).astype(np.int32)  # odd tokens are wrong
    right = np.pad(agreement(rate, tokens, seed=ratio), (0, margin), constant_values=True)
    drafter = make(SleepingModel(with_errors(answer, right), token_seconds, ratio, clock), answer)
    options = DecodeOptions(SamplingParams(temperature=0), tokens, max_nodes=nodes)
    prompt = np.zeros(1, np.int32)
    started = time.perf_counter()
    decoded = finish(Generation(SleepingVerifier(answer, ratio * token_seconds, clock), drafter, prompt, options))
    seconds = time.perf_counter() - started
    assert decoded.tokens == answer[:tokens].tolist()
    return drafter, right, seconds, clock


def simulate(ratio: int, rate: float, tokens: int, token_seconds: float, window: int | None = None) -> dict[str, Any]:
    """One run of the loop, with the figures of the ideal timeline, whose window is c. Default window: c."""
    window = window or ratio
    options = PearlOptions(window=window, ahead=0)
    drafter, right, seconds, clock = run_loop(
        lambda model, _: PearlDrafter(model, options), ratio, rate, tokens, token_seconds, window
    )
    assert isinstance(drafter, PearlDrafter)
    ideal = tokens / (ideal_steps(right, tokens, ratio) * ratio * token_seconds)
    accepted = drafter.accepted_tokens / max(1, drafter.rejections)
    return {
        "c": ratio,
        "alpha": rate,
        "tokens_per_second": round(tokens / seconds, 2),
        "ideal_tokens_per_second": round(ideal, 2),
        "expected_ideal_tokens_per_second": round(ideal_tokens_per_step(rate, ratio) / (ratio * token_seconds), 2),
        "share_of_ideal": round(tokens / seconds / ideal, 4),
        "mean_accepted": round(accepted, 4),
        "theory_accepted": round(rate / (1 - rate), 4),
        "accepted_over_theory": round(accepted / (rate / (1 - rate)), 4),
        **clock.shares(seconds),
    }


def simulate_fusion(ratio: int, rate: float, tokens: int, token_seconds: float) -> dict[str, Any]:
    """Tokens per second of `pearl`, of tables alone (`fusion`), and of both by when the draft model drafts."""
    options = PearlOptions(window=ratio, ahead=0)

    def union(when: DraftTime) -> Callable[[LanguageModel, Ints], Drafter]:
        return lambda model, answer: UnionDrafter(
            KnownRuns(answer), ModelChain(model, options), Schedules(), DraftOptions().gamma, when
        )

    methods: dict[str, Callable[[LanguageModel, Ints], Drafter]] = {
        "pearl": lambda model, _: PearlDrafter(model, options),
        "fusion": lambda _, answer: KnownRuns(answer),
        "before": union("before"),
        "beside": union("beside"),
        "auto": union("auto"),
    }
    figures: dict[str, Any] = {"c": ratio, "alpha": rate}
    for name, make in methods.items():
        _, _, seconds, _ = run_loop(make, ratio, rate, tokens, token_seconds, 4 * ratio)
        figures[name] = round(tokens / seconds, 2)
    return figures


def run_simulation(tokens: int, token_ms: float, out: Path | None) -> list[dict[str, Any]]:
    """Simulates all ratios and rates; prints, and saves the figures if `out` is given."""
    rows: list[dict[str, Any]] = []
    fused: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("simulating", total=len(RATIOS) * len(RATES))
        for ratio in RATIOS:
            for rate in RATES:
                rows.append(simulate(ratio, rate, tokens, token_ms / 1e3))
                fused.append(simulate_fusion(ratio, rate, tokens, token_ms / 1e3))
                progress.advance(task)
    show(rows)
    report.print_figures("Tokens per second beside tables that know half of the answer", FUSION_COLUMNS, fused, FUSION_LEGEND)
    if out:
        report.save(out, {"tokens": tokens, "draft_token_ms": token_ms, "results": rows, "fusion": fused})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the figures of every ratio and rate."""
    columns = {
        "c": "c",
        "a": "alpha",
        "tokens/s": "tokens_per_second:.2f",
        "ideal\ntokens/s": "ideal_tokens_per_second:.2f",
        "share\nof ideal": "share_of_ideal:.3f",
        "accepted": "mean_accepted:.3f",
        "accepted\nin theory": "theory_accepted:.3f",
        "draft\nbusy": "draft_busy:.3f",
        "verify\nbusy": "verify_busy:.3f",
        "both\nbusy": "both_busy:.3f",
    }
    report.print_figures(
        "PEARL's loop over models that sleep",
        columns,
        rows,
        "c: draft tokens in the time of a verification; a: acceptance rate; accepted: "
        "tokens between two rejections; busy: share of the time.",
    )
