"""A round: one forward for the steps of several requests, and for parts of the prompts that are being read.

Every request drafts, the nodes of all drafts share the round's budget, one forward computes the rows of all, and each request
is judged and committed by itself. An error of one request does not disturb the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from outrider.drafters.policy import Probe, ema
from outrider.verify.budget import Selection, share
from outrider.verify.generation import Drafted, Generation, Plan, Step
from outrider.verify.model.segment import Segment
from outrider.verify.pace import MIN_CHUNK_TOKENS, Pace
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS

T = TypeVar("T")
UNMEASURED_CHUNK_TOKENS = 64  # without a cost curve
OVERLAP_PROBE_INTERVAL = 64  # rounds
# Of the time of a round that also reads a prompt; the prompt takes at most 1 / (1 - STEPS_SHARE) times as long for it.
STEPS_SHARE = 0.4

Together = Callable[[Sequence[Callable[[], None]]], None]  # runs the drafting of several requests

# A step; or the error that ends the request; or None if its prompt waits, because the round reads enough of others.
Outcome = Step | Exception | None


@dataclass
class Member:
    """One request in a round."""

    generation: Generation
    outcome: Outcome = None
    drafted: Drafted | None = None
    plan: Plan | None = None
    segment: Segment | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """The result of `work`, or None after an error, which ends the request."""
        try:
            return work()
        except torch.AcceleratorError:
            raise  # only a new process can use the device again
        except Exception as error:
            self.outcome = error
            return None

    def draft(self) -> None:
        """Asks for a draft, unless the answer has no tokens left."""
        if self.generation.remaining:
            self.drafted = self.attempt(self.generation.draft)
        else:
            self.outcome = Step([], "length")

    def read(self, tokens: int) -> int:
        """Takes part with at most `tokens` of the prompt; returns their number."""
        if tokens > 0:
            self.segment = self.attempt(lambda: self.generation.verifier.chunk(tokens))
        return self.segment.rows if self.segment else 0

    def select(self, selection: Selection) -> None:
        """Plans the step with the selected nodes."""
        assert self.drafted is not None
        self.plan = self.generation.plan(self.drafted, selection)
        self.segment = self.generation.verifier.segment(self.plan.tree)

    def complete(self, logits: torch.Tensor, seconds: float) -> None:
        """Ends the member's part of the round after its forward."""
        segment, plan = self.segment, self.plan
        assert segment is not None
        if plan is None:
            self.outcome = Step([])
            self.attempt(lambda: self.generation.verifier.read(segment, logits))
        else:
            self.outcome = self.attempt(lambda: self.generation.complete(plan, logits, seconds)) or self.outcome


def in_turns(work: Sequence[Callable[[], None]]) -> None:
    """Runs the drafting of several requests, one after the other."""
    for each in work:
        each()


class Round:
    """One round of requests to the same model: drafts and starts the forward when it is made, judges in `end`."""

    def __init__(
        self,
        generations: Sequence[Generation],
        pace: Pace | None = None,
        keeps: bool = False,
        together: Together = in_turns,
    ) -> None:
        """Prompts are read in the order of the requests, beside steps as much as `pace` allows.

        With `keeps`, another round may start before `end`. Raises torch.AcceleratorError.
        """
        started = time.perf_counter()
        self._pace, self._keeps = pace or Pace(), keeps
        self._members = [Member(generation) for generation in generations]
        readers = [member for member in self._members if member.generation.verifier.unread]
        steps = [member for member in self._members if not member.generation.verifier.unread]
        together([member.draft for member in steps])
        share_seconds(steps, time.perf_counter() - started)
        left, self._predicted = plan_round([member for member in steps if member.drafted is not None], readers, self._pace)
        for member in readers:
            left -= member.read(left)
        self._reads = bool(readers)
        if left:  # the prompts had fewer tokens, so the round takes less time than predicted
            self._predicted = 0.0
        self._computed = [member for member in self._members if member.segment is not None]
        self._started = time.perf_counter()
        self._logits = compute(self._computed, keeps)
        self.host_seconds = self._started - started  # of drafting, and later of judging, without waiting for the device
        self.device_seconds = 0.0  # from the forward's start to the first request's verdict, once the round has ended

    def end(self) -> list[Outcome]:
        """The outcome of each request. Raises torch.AcceleratorError."""
        if self._logits is None:
            for member in self._computed:
                compute_alone(member)
        else:
            seconds = time.perf_counter() - self._started
            for member, rows in zip(self._computed, self._logits, strict=True):
                member.complete(rows, seconds)
                if member.plan is not None and not self.device_seconds:  # reading a prompt does not wait for the device
                    self.device_seconds = time.perf_counter() - self._started
            if not self._reads and not self._keeps:
                observe(self._computed, time.perf_counter() - self._started)
        elapsed = time.perf_counter() - self._started
        self.host_seconds += elapsed - self.device_seconds
        if self._computed and all(member.plan is None for member in self._computed):
            self._pace.record_chunk(sum(member.segment.rows for member in self._computed if member.segment), elapsed)
        if self._predicted and not self._keeps and self._logits is not None:
            self._pace.record(self._reads, self._predicted, self.host_seconds + self.device_seconds)
        return [member.outcome for member in self._members]


class Overlap:
    """Whether two rounds of half the requests each should alternate, one on the device while the host works for the other.

    A forward of half the rows takes as long, because it reads the same weights. So this pays where the host's work takes longer
    than the forward.
    """

    def __init__(self) -> None:
        self._host_seconds = self._device_seconds = 0.0  # of a round of all requests (EMA)
        self._probe = Probe(OVERLAP_PROBE_INTERVAL)

    def record(self, ended: Round) -> None:
        """Records a round that was not overlapped."""
        self._host_seconds = ema(self._host_seconds, ended.host_seconds)
        self._device_seconds = ema(self._device_seconds, ended.device_seconds)

    def pays(self) -> bool:
        """Whether the next round should overlap the one after it; now and then not, to measure again."""
        return self._host_seconds > self._device_seconds and not self._probe.due()


def run_round(generations: Sequence[Generation], pace: Pace | None = None) -> list[Outcome]:
    """Runs a round from its start to its end. Raises torch.AcceleratorError."""
    return Round(generations, pace).end()


def plan_round(steps: Sequence[Member], readers: Sequence[Member], pace: Pace) -> tuple[int, float]:
    """Selects the nodes of all steps.

    Returns how many tokens of the readers' prompts the round reads, and how many seconds it takes; 0 = unknown.
    """
    if not steps:
        return pace.chunk(PREFILL_CHUNK_TOKENS), 0.0
    offers = [member.generation.offer(member.drafted) for member in steps if member.drafted]
    selections, tokens, seconds = share(offers), UNMEASURED_CHUNK_TOKENS, 0.0
    curve = next((member.generation.curve for member in steps if member.generation.curve), None)
    if curve is not None:
        costs = curve.of_rows(sum(offer.context for offer in offers) // len(steps), len(steps), count(selections))
        seconds = float(costs[-1])
        if readers:
            limit = pace.limit(seconds)
            most = int(np.searchsorted(costs, STEPS_SHARE * limit, "right"))
            selections = share(offers, max(0, most - len(steps)))
            rows = count(selections)
            read = curve.of_rows(readers[0].generation.read_tokens, 1, rows + PREFILL_CHUNK_TOKENS)[rows - 1 :]
            read = read - read[0] + costs[rows - 1]
            tokens = max(MIN_CHUNK_TOKENS, int(np.searchsorted(read[1:], limit, "right")))
            seconds = float(read[tokens])
    for member, selection in zip(steps, selections, strict=True):
        member.attempt(partial(member.select, selection))
    return tokens if readers else 0, seconds


def count(selections: Sequence[Selection]) -> int:
    """The rows of all steps."""
    return sum(1 + len(selection.tree) for selection in selections)


def observe(steps: Sequence[Member], seconds: float) -> None:
    """Corrects the cost curve by a round of nothing but steps, and by its seconds from the forward's start to the end."""
    outcomes = [member.outcome for member in steps if isinstance(member.outcome, Step)]
    curve = next((member.generation.curve for member in steps if member.generation.curve), None)
    if curve is not None and len(outcomes) == len(steps):
        context = sum(member.generation.context for member in steps) // len(steps)
        rows = sum(member.segment.rows for member in steps if member.segment)
        curve.observe(context, len(steps), rows, seconds - sum(step.commit_seconds for step in outcomes))


def share_seconds(steps: Sequence[Member], seconds: float) -> None:
    """Divides the time of all drafts among them: what was drafted at the same time took less than its sum."""
    drafted = [member for member in steps if member.drafted is not None]
    total = sum(member.drafted.seconds for member in drafted if member.drafted)
    for member in drafted if total > seconds else []:
        assert member.drafted is not None
        member.drafted = replace(member.drafted, seconds=member.drafted.seconds * seconds / total)


def compute(members: Sequence[Member], keeps: bool) -> list[torch.Tensor] | None:
    """The logits of all members by one forward, which a device may still be computing; None if it failed."""
    if not members:
        return []
    try:
        segments = [member.segment for member in members if member.segment]
        logits = members[0].generation.verifier.runner.forward_all(segments)
    except torch.AcceleratorError:
        raise
    except Exception:
        return None  # one member's rows may be the reason
    return [rows.clone() for rows in logits] if keeps else logits


def compute_alone(member: Member) -> None:
    """Completes a member by a forward of its own, whose error ends this request only."""
    segment, started = member.segment, time.perf_counter()
    assert segment is not None
    logits = member.attempt(lambda: member.generation.verifier.runner.forward_all([segment])[0])
    if logits is not None:
        member.complete(logits, time.perf_counter() - started)
