"""PEARL's loop against its theory: the real loop over two models that only sleep.

Theory, for a draft token accepted with probability a, independently, and a window of g = c tokens, so that drafting a window
and one verification take the same time T. A step that verifies nothing (pre-verify) emits one token and finds the first
guess right with probability a. A step that verifies the g - 1 guesses left emits 1 + a + ... + a^(g-1) tokens and finds all
of them and the next guess right with probability a^g. So a share p = a / (1 + a - a^g) of the steps is of the second kind,
and the ideal timeline emits (1 - p) + p (1 - a^g) / (1 - a) tokens in T.

Between two rejections k tokens are accepted with probability (1 - a) a^k, a / (1 - a) in the mean: the sum in the proof of the
paper's Theorem 2. The theorem calls that sum 1 / (1 - a) and adds one for the target's own token; what is right with it is
a / (1 - a) + 1 = 1 / (1 - a), and that is compared here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from drafters.interface import DraftTree, Ints, Logprobs, Sampling, Verdict
from drafters.model.language_model import Candidates
from drafters.options import PearlOptions
from drafters.pearl import PearlDrafter
from drafters.sequence import Sequence
from verify.acceptance import walk
from verify.decode import DecodeOptions, Generation, finish
from verify.sampling_params import SamplingParams

T = TypeVar("T")
RATIOS = (3, 5, 8)  # c
RATES = (0.5, 0.7, 0.9)  # a
WRONG = 1  # added to a token that is to be rejected


def ideal_tokens_per_step(rate: float, window: int) -> float:
    """Of the ideal timeline, tokens in the time of one verification."""
    post = rate / (1 + rate - rate**window)
    return (1 - post) + post * (1 - rate**window) / (1 - rate)


def ideal_steps(right: NDArray[np.bool_], tokens: int, window: int) -> int:
    """Of the ideal timeline, for so many tokens, when these very guesses are right (bool, by position)."""
    at, steps, guessed = 0, 0, False
    while at < tokens:
        steps += 1
        size = window - 1 if guessed else 0
        wrong = np.flatnonzero(~right[at : at + size + 1])
        guessed = not len(wrong)  # all guesses, and the next one
        at += size + 1 if guessed else int(wrong[0]) + 1
    return steps


def agreement(rate: float, tokens: int, seed: int) -> NDArray[np.bool_]:
    """At which positions the draft model is right, bool [tokens]: exactly that share of them, in random order."""
    right = np.arange(tokens) < round(rate * tokens)
    np.random.default_rng(seed).shuffle(right)
    return right


@dataclass
class Clock:
    """When each of the two was busy."""

    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"draft": [], "verify": []})

    def spend(self, who: str, work: Callable[[], T]) -> T:
        """What `work` returns; the time goes on the record."""
        started = time.perf_counter()
        result = work()
        self.spans[who].append((started, time.perf_counter()))
        return result

    def shares(self, seconds: float) -> dict[str, float]:
        """Of that time: how much each was busy, and both at once."""
        busy = {who: sum(stop - start for start, stop in spans) for who, spans in self.spans.items()}
        busy["both"] = self._both()
        return {f"{who}_busy": round(each / seconds, 3) for who, each in busy.items()}

    def _both(self) -> float:
        total, at = 0.0, 0
        verified = self.spans["verify"]
        for start, stop in self.spans["draft"]:  # both lists are in order
            while at < len(verified) and verified[at][1] <= start:
                at += 1
            other = at
            while other < len(verified) and verified[other][0] < stop:
                total += min(stop, verified[other][1]) - max(start, verified[other][0])
                other += 1
        return total


class SleepingModel:
    """A draft model that sleeps for each forward, and is right where it is told to be. Implements `LanguageModel`."""

    def __init__(self, answer: Ints, right: NDArray[np.bool_], seconds: float, ratio: float, clock: Clock) -> None:
        self._guesses = np.where(right, answer, answer + WRONG)
        self._seconds = seconds
        self._clock = clock
        self.speed_ratio = ratio
        self._emitted = 0
        self._rows = 0  # beside row 0
        self._thread = ThreadPoolExecutor(1)

    def begin(self, text: Sequence, sampling: Sampling | None = None) -> None:
        self._emitted, self._rows = 0, 0

    @property
    def space(self) -> int:
        return len(self._guesses) - self._emitted - self._rows - 1

    def root(self, count: int) -> Candidates:
        self._rows = 0
        return self._forward()

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        self._rows += 1
        return self._forward()

    def retract(self, rows: int) -> None:
        self._rows = rows - 1

    def advance(self, tokens: Ints) -> None:
        self._emitted += len(tokens)
        self._rows = max(0, self._rows - len(tokens))

    def beside(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def _forward(self) -> Candidates:
        self._clock.spend("draft", lambda: time.sleep(self._seconds))
        guess = self._guesses[self._emitted + self._rows]
        return Candidates(np.array([[guess]], np.int32), np.full((1, 1), 0.5, np.float32))


class SleepingVerifier:
    """A target that sleeps for each step and emits a known answer. Implements `verify.verifier.Verifier`."""

    context_tokens = 1 << 30
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

    def prefill(self) -> Iterator[int]:
        yield from ()

    def verify(self, tree: DraftTree, feedback: int = 0, allowed: NDArray[np.bool_] | None = None) -> Verdict:
        self._clock.spend("verify", lambda: time.sleep(self._seconds))
        choices = self._answer[self.sequence.emitted :][[0, *tree.depths.tolist()]]
        rows, tokens = walk(tree, choices.tolist())
        return Verdict(tree, rows, tokens, seconds=self._seconds)

    def commit(self, verdict: Verdict) -> None:
        self.sequence.append(verdict.tokens)

    def truncate(self, length: int) -> None:
        self.sequence.truncate(length)


def simulate(ratio: int, rate: float, tokens: int, token_seconds: float) -> dict[str, Any]:
    """One run of the loop, beside the ideal."""
    clock = Clock()
    beyond = 2 * ratio + 2  # positions that are guessed, and never reached
    answer = 2 * np.random.default_rng(1).integers(0, 1000, tokens + beyond).astype(np.int32)  # odd tokens are wrong
    right = np.pad(agreement(rate, tokens, seed=ratio), (0, beyond), constant_values=True)
    model = SleepingModel(answer, right, token_seconds, ratio, clock)
    drafter = PearlDrafter(model, PearlOptions(window=ratio, ahead=0))
    options = DecodeOptions(SamplingParams(temperature=0), tokens, max_nodes=ratio)
    prompt = np.zeros(1, np.int32)
    started = time.perf_counter()
    decoded = finish(Generation(SleepingVerifier(answer, ratio * token_seconds, clock), drafter, prompt, options))
    seconds = time.perf_counter() - started
    assert decoded.tokens == answer[:tokens].tolist()
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


def run_simulation(tokens: int, token_ms: float, out: Path | None) -> list[dict[str, Any]]:
    """All ratios and rates; prints and saves."""
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("simulating", total=len(RATIOS) * len(RATES))
        for ratio in RATIOS:
            for rate in RATES:
                rows.append(simulate(ratio, rate, tokens, token_ms / 1e3))
                progress.advance(task)
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if out:
        report.save(out, {"tokens": tokens, "draft_token_ms": token_ms, "results": rows})
    return rows
