"""A round: one forward for the steps of several requests, and for parts of the prompts that are being read.

Every request drafts, the nodes of all drafts share the round's budget, one forward computes the rows of all, and each request
is judged and committed by itself. An error of one request does not disturb the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from verify.budget import Selection, share
from verify.generation import Drafted, Generation, Plan, Step
from verify.model.segment import Segment
from verify.verifier import PREFILL_CHUNK_TOKENS

T = TypeVar("T")
MIN_CHUNK_TOKENS = 16  # of a prompt that is read beside steps
UNMEASURED_CHUNK_TOKENS = 64  # without a cost curve
READING_FACTOR = 2.0  # by default, a round that also reads a prompt takes at most this multiple of its steps' time

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


def run_round(generations: Sequence[Generation], max_seconds: float | None = None) -> list[Outcome]:
    """Runs one round of requests to the same model. Prompts are read in the order of the requests.

    `max_seconds` bounds the time of a round that reads prompts beside steps; None = READING_FACTOR times that of its steps.
    Raises torch.AcceleratorError.
    """
    members = [Member(generation) for generation in generations]
    readers = [member for member in members if member.generation.verifier.unread]
    steps = [member for member in members if not member.generation.verifier.unread]
    for member in steps:
        member.draft()
    steps = [member for member in steps if member.drafted is not None]
    left = most = chunk_tokens(steps, readers[0].generation.read_tokens, max_seconds) if readers else 0
    for member in readers:
        left -= member.read(left)
    plan_steps(steps, most - left)
    forward([member for member in members if member.segment is not None])
    return [member.outcome for member in members]


def chunk_tokens(steps: Sequence[Member], read: int, max_seconds: float | None) -> int:
    """How many tokens of prompts are read beside these steps; of the first prompt, `read` tokens have been read."""
    curve = next((member.generation.curve for member in steps if member.generation.curve), None)
    if not steps or curve is None:
        return UNMEASURED_CHUNK_TOKENS if steps else PREFILL_CHUNK_TOKENS
    rows = sum(1 + len(member.drafted.tree) for member in steps if member.drafted)
    context = sum(member.generation.context for member in steps) // len(steps)
    step_seconds = float(curve.of_rows(context, len(steps), rows)[-1])
    left = (READING_FACTOR * step_seconds if max_seconds is None else max_seconds) - step_seconds
    costs = curve.of_rows(read, 1, rows + PREFILL_CHUNK_TOKENS)
    return max(MIN_CHUNK_TOKENS, int(np.searchsorted(costs[rows:] - costs[rows - 1], left, "right")))


def plan_steps(steps: Sequence[Member], rows: int) -> None:
    """Shares the round's nodes out among the steps. The round computes `rows` other rows besides."""
    selections = share([member.generation.offer(member.drafted) for member in steps if member.drafted], rows)
    for member, selection in zip(steps, selections, strict=True):
        member.attempt(partial(member.select, selection))


def forward(members: Sequence[Member]) -> None:
    """One forward for all members; one for each of them if that fails, so that an error ends one request only."""
    if not members:
        return
    runner, started = members[0].generation.verifier.runner, time.perf_counter()
    try:
        logits = runner.forward_all([member.segment for member in members if member.segment])
    except torch.AcceleratorError:
        raise
    except Exception as error:
        if len(members) == 1:
            members[0].outcome = error
        else:
            for member in members:
                forward([member])
        return
    seconds = time.perf_counter() - started
    for member, rows in zip(members, logits, strict=True):
        member.complete(rows, seconds)
