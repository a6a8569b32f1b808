"""Decides what each round computes: nodes of drafts, tokens of waiting prompts, and whether the next round overlaps it.

The cost curve says what rows take, each stream's `Budget` what its drafts are worth. What rounds take corrects the curve and
the predictions. A round's `Plan` says what was decided and why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.drafters.policy import Probe, bounded, ema
from outrider.verify.budget import Budget, Choice, Draft, curve_of, divide_nodes
from outrider.verify.cost import CostCurve, Kinds, Touched, kinds_of_step
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS

# The first chunk of a round without steps is this small, because the time per token is still unknown.
FIRST_CHUNK_TOKENS = 64
MIN_CHUNK_TOKENS = 8
# A round that only reads takes about this long, because a request that arrives waits for its end. It reads at least as many
# tokens as let a forward reach its full speed.
READING_SECONDS = 0.5
READING_TOKENS = 32
# Without a cost curve, a round with steps reads this many tokens of a prompt.
UNMEASURED_CHUNK_TOKENS = 64
# By default, a round that reads a prompt takes at most this multiple of the usual time of rounds without one.
READING_FACTOR = 1.8
# Steps get this share of a round that also reads a prompt, so steps slow a prompt by at most 1 / (1 - STEPS_SHARE).
STEPS_SHARE = 0.4
# While rounds overlap, one in this many does not, so that its times are measured again.
OVERLAP_PROBE_INTERVAL = 64
# Rounds are evaluated this many at a time. Each step reads all weights, which displace all else from the processor's caches, so
# that a first evaluation takes 1 % of a small model's step, and further ones much less.
EVALUATED_ROUNDS = 8


@dataclass(frozen=True)
class Plan:
    """The nodes and prompt tokens that a round computes, and the prediction behind them."""

    choices: Sequence[Choice]  # the nodes of each draft
    chunk_tokens: int = 0  # tokens of waiting prompts
    seconds: float | None = None  # predicted time from the forward's start to the end; None = unknown
    curve: CostCurve | None = None  # what predicts it, for steps after `context` tokens
    context: int = 0
    reads: bool = False  # whether prompts wait

    def __str__(self) -> str:
        """One line for the log."""
        parts = [str(choice) for choice in self.choices]
        if self.reads:
            parts.append(f"a chunk of at most {self.chunk_tokens} tokens")
        seconds = "not predicted" if self.seconds is None else f"predicted {1e3 * self.seconds:.2f} ms"
        return f"{'; '.join(parts)}; {seconds}"


@dataclass(frozen=True)
class Times:
    """The seconds of a round that no other round overlapped."""

    host: float  # drafting and accepting, without waiting for the device
    device: float  # from the forward's start to the first stream's verdict; 0 if the round had no steps
    forward: float | None  # from the forward's start to the end, without commits; None if a step has failed

    @property
    def whole(self) -> float:
        return self.host + self.device


class Controller:
    """Plans the rounds of one worker."""

    def __init__(self, silent_seconds: float = math.inf) -> None:
        """`silent_seconds` bounds rounds without steps, because the worker reports progress only when a round ends."""
        self._silent_seconds = silent_seconds
        self._token_seconds: float | None = None  # seconds per token in the latest round without steps
        self._usual: float | None = None  # seconds of rounds without prompts (EMA), or of what such a round would have taken
        self._errors = {reads: 1.0 for reads in (False, True)}  # measured over predicted time (EMA)
        self._host_seconds: float | None = None  # EMA
        self._device_seconds: float | None = None  # EMA
        self._probe = Probe(OVERLAP_PROBE_INTERVAL)
        self._recorded: list[tuple[Plan, int, Times, Touched | None]] = []  # rounds with steps that have not been evaluated

    def plan(self, drafts: Sequence[Draft], budgets: Sequence[Budget], read_tokens: int | None = None) -> Plan:
        """Plans a round of these drafts. `read_tokens` is the most that has been read of a prompt; None if none waits."""
        reads = read_tokens is not None
        if not drafts:
            return Plan([], self._chunk(PREFILL_CHUNK_TOKENS), reads=reads)
        choices, curve = divide_nodes(drafts, budgets), curve_of(budgets)
        if curve is None:
            return Plan(choices, UNMEASURED_CHUNK_TOKENS if reads else 0, reads=reads)
        context, streams = sum(draft.context for draft in drafts) // len(drafts), len(drafts)
        seconds = curve.of_step(context, streams, total_rows(choices), kinds_of_choices(choices))
        if read_tokens is None:
            return Plan(choices, 0, seconds, curve, context)
        limit = self._limit(seconds)
        costs = curve.of_rows(context, streams, total_rows(choices), kinds_of_choices(choices))
        most = int(np.searchsorted(costs, STEPS_SHARE * limit, "right"))
        choices = divide_nodes(drafts, budgets, max(0, most - streams))
        rows, kinds = total_rows(choices), kinds_of_choices(choices)
        reading = curve.of_rows(read_tokens, 1, rows + PREFILL_CHUNK_TOKENS, kinds)[rows - 1 :]
        reading = reading - reading[0] + costs[rows - 1]
        tokens = max(MIN_CHUNK_TOKENS, int(np.searchsorted(reading[1:], limit, "right")))
        return Plan(choices, tokens, float(reading[tokens]), curve, context, reads)

    def record_reading(self, tokens: int, seconds: float) -> None:
        """Records a round that only read prompts, as much of them as planned."""
        self._token_seconds = seconds / tokens

    def record(self, plan: Plan, rows: int, times: Times, touched: Touched | None = None) -> None:
        """Records a round with steps over `rows` rows in all, which read as much as planned."""
        self._recorded.append((plan, rows, times, touched))
        if len(self._recorded) == EVALUATED_ROUNDS:
            self._evaluate()

    def _evaluate(self) -> None:
        """Learns from the rounds that were recorded."""
        recorded, self._recorded = self._recorded, []
        for each in recorded:
            self._learn(*each)

    def _learn(self, plan: Plan, rows: int, times: Times, touched: Touched | None) -> None:
        """Corrects the curve, the predictions and the usual times."""
        self._host_seconds = ema(self._host_seconds, times.host)
        self._device_seconds = ema(self._device_seconds, times.device)
        if plan.curve is None or plan.seconds is None:
            return
        if any(choice.work.beside for choice in plan.choices):
            return  # it has waited for the draft model, too
        if not plan.reads and times.forward is not None:
            slowdown = max(choice.work.slowdown for choice in plan.choices)
            plan.curve.observe(plan.context, len(plan.choices), rows, times.forward / slowdown, touched)
        error = self._errors[plan.reads]
        self._errors[plan.reads] = ema(error, bounded(error, times.whole / plan.seconds))
        if not plan.reads:
            self._usual = ema(self._usual, plan.seconds * self._errors[False])

    def overlaps(self) -> bool:
        """Whether two rounds of half the streams each should alternate, one on the device while the host works for the other.

        A forward of half the rows takes as long, because it reads the same weights. So this is worth it where the host's work
        takes longer than the forward. Now and then it is False, to measure again.
        """
        self._evaluate()
        if self._host_seconds is None or self._device_seconds is None:
            return False
        return self._host_seconds > self._device_seconds and not self._probe.tick()

    def _limit(self, predicted: float) -> float:
        """The most predicted seconds of the next round, if it reads a prompt. `predicted` is the time of its steps alone."""
        self._evaluate()
        self._usual = ema(self._usual, predicted * self._errors[False])
        return READING_FACTOR * self._usual / self._errors[True]

    def _chunk(self, most: int) -> int:
        """The number of prompt tokens, at most `most`, that a round without steps reads."""
        if self._silent_seconds == math.inf:
            return most
        if not self._token_seconds:
            return min(most, FIRST_CHUNK_TOKENS)
        fair = max(READING_TOKENS, READING_SECONDS / self._token_seconds)
        return int(min(most, fair, max(MIN_CHUNK_TOKENS, self._silent_seconds / self._token_seconds)))


def total_rows(choices: Sequence[Choice]) -> int:
    return sum(1 + len(choice.tree) for choice in choices)


def kinds_of_choices(choices: Sequence[Choice]) -> Kinds:
    """The kinds of these rows but the first."""
    return kinds_of_step([choice.tree for choice in choices])
