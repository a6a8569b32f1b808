"""Chooses the draft nodes that a round verifies: the subtrees of all streams with the most expected tokens per second.

The cost of the likeliest n nodes comes from the machine's cost curve; their expected tokens are the sum of their path
probabilities, corrected by the trust in the stream's drafter at each depth. So drafting that does not pay stops within a few
steps, and resumes after a probe that pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from outrider.drafters.interface import EMPTY, NO_WORK, DraftTree, Ints, Work
from outrider.drafters.policy import Probe, Trust, ema
from outrider.drafters.sequence import UNLIMITED
from outrider.verify.cost import CostCurve, Kind, kinds_of

# Drafting starts as if it paid a little, so it stops after a dozen drafts that gain nothing.
HOPE = 1.1
# Drafting must gain this much, because choosing nodes and ranking the model's own candidates take time, too.
LEAST_GAIN = 1.03
# While drafting does not pay, a stream drafts once in PROBE_INTERVAL steps, later once in LONGEST_INTERVAL.
PROBE_INTERVAL = 4
LONGEST_INTERVAL = 8
# While drafting pays less than CLEAR_GAIN, one step in this many drafts nothing, to measure what drafting is compared with.
PLAIN_INTERVAL = 16
CLEAR_GAIN = 1.5
MIN_NODES = 3
# Each of the first depths has a trust of its own; deeper nodes share that of the last.
TRUSTED_DEPTHS = 4
# A stream requests this many nodes at first, and more only if a draft of this size clearly pays.
FULL_NODES = 64
# A last node with this gain over break-even restores the full budget, and then doubles it.
FULL_BUDGET_GAIN = 1.5


@dataclass(frozen=True)
class Draft:
    """A stream's proposal for one step."""

    tree: DraftTree
    depth: int = UNLIMITED  # depth of the deepest node that the step may verify
    seconds: float = 0.0  # time that drafting took
    context: int = 0  # tokens before the draft
    prunable: bool = True  # whether nodes may be dropped before verification
    nodes: int = 0  # number of nodes that the drafter could propose
    work: Work = NO_WORK  # of a draft model


@dataclass(frozen=True)
class Choice:
    """The nodes of one draft that a round verifies."""

    tree: DraftTree
    proposed: int  # nodes of the whole draft
    expected: float | None = None  # tokens that the step is expected to emit; None = unknown
    gain: float = 1.0  # expected tokens per second of the round, drafting included, over those without drafts
    next_nodes: int | None = None  # number of nodes to request from the next step on; None = unchanged
    work: Work = NO_WORK  # of a draft model

    @classmethod
    def whole(cls, draft: Draft) -> Choice:
        """All nodes, without a prediction."""
        return cls(draft.tree, len(draft.tree), work=draft.work)

    def __str__(self) -> str:
        """The reason for the choice, for the log."""
        nodes = f"{len(self.tree)} of {self.proposed} nodes"
        if self.expected is not None:
            nodes += f" ({self.expected:.2f} tokens expected, gain {self.gain:.2f})"
        beside = ", which goes on beside it" if self.work.beside else ""
        return f"{nodes}, {self.work.reason}{beside}" if self.work.reason or beside else nodes


class Budget:
    """How many nodes one stream drafts; `divide_nodes` chooses those that a round verifies.

    With a cost curve, the curve and the drafter's past acceptance decide. Without one, each step drafts the same number of
    nodes and verifies all of them.
    """

    def __init__(self, nodes: int = FULL_NODES, curve: CostCurve | None = None) -> None:
        """`nodes` is the number without a `curve`, and has no effect with one."""
        self.curve = curve
        self.draft_seconds: float | None = None  # seconds per draft without a draft model's work (EMA)
        self._trust = [Trust() for _ in range(TRUSTED_DEPTHS)]
        self._has_drafted = False
        self._asked = 0  # nodes requested for this step
        self._most = nodes if curve is None else curve.nodes[-1]
        self._requested = nodes if curve is None else min(FULL_NODES, self._most)
        self._gain = HOPE  # gain of drafting (EMA)
        self._probe = Probe(PROBE_INTERVAL, LONGEST_INTERVAL)
        self._plain = Probe(PLAIN_INTERVAL)

    def expected(self, tree: DraftTree) -> list[float]:
        """The path probabilities of the N nodes, corrected by how far the drafter's came true at each depth.

        Without a cost curve, they are the drafter's.
        """
        factors = [trust.factor for trust in self._trust]
        probabilities, depths = tree.probability.tolist(), tree.depths.tolist()
        untrusted = max(depths, default=0) - TRUSTED_DEPTHS
        correction = list(accumulate([1.0, *factors, *factors[-1:] * untrusted], mul))
        return [probability * correction[depth] for probability, depth in zip(probabilities, depths, strict=True)]

    def nodes(self) -> int:
        """The number of nodes that the drafter may propose in this step. Called once per step."""
        if self.curve is None:
            return self._requested
        self._asked = 0
        if self._gain >= LEAST_GAIN:
            self._probe.reset()
            if self._gain >= CLEAR_GAIN or not self._plain.tick():
                self._asked = self._requested
        elif self._probe.tick():
            self._asked = self._requested
        return self._asked

    def least(self, context: int) -> float:
        """The path probability below which no node after `context` tokens would be verified."""
        return 0.0 if self.curve is None else self.curve.least_probability(context)

    def record(self, draft: DraftTree, choice: Choice, tokens: Ints, draft_seconds: float) -> None:
        """Records one step's outcome: the emitted tokens (int32 [A+1]) and the seconds that drafting took."""
        if self.curve is None or not self._asked:
            return
        self._requested = choice.next_nodes or self._requested
        self._gain = ema(self._gain, choice.gain)
        if self._has_drafted:  # the first draft of a request prepares more than the others
            own = max(0.0, draft_seconds - choice.work.seconds - choice.work.invested)
            self.draft_seconds = ema(self.draft_seconds, own)
        self._has_drafted = True
        for depth, (probability, was_accepted) in enumerate(outcome(draft, tokens)):
            self._trust[min(depth, TRUSTED_DEPTHS - 1)].record(probability, was_accepted)

    def next_nodes(self, useful: int, drafted: int, last_gain: float) -> int | None:
        """A drafter that fills its budget gets only the useful size next time, or more nodes if the last one clearly paid.

        `last_gain` is the gain of the draft's last node over break-even.
        """
        if useful < drafted == self._requested:
            return max(MIN_NODES, useful)
        if useful < drafted or last_gain <= FULL_BUDGET_GAIN:
            return None
        return min(self._most, max(FULL_NODES, self._requested * (2 if drafted == self._requested else 1)))


def divide_nodes(drafts: Sequence[Draft], budgets: Sequence[Budget], most: int | None = None) -> list[Choice]:
    """Chooses the nodes of each stream's draft with which one round emits the most tokens per second.

    `most` bounds their number where the round also reads a prompt. Has no side effects.
    """
    drafted = sum(len(draft.tree) for draft in drafts)
    curve = curve_of(budgets)
    if not drafted or curve is None:
        return [Choice.whole(draft) for draft in drafts]
    forced = [each for draft, budget in zip(drafts, budgets, strict=True) for each in forced_nodes(draft, budget)]
    if all(forced):
        return [Choice.whole(draft) for draft in drafts]
    gains = [each for draft, budget in zip(drafts, budgets, strict=True) for each in budget.expected(draft.tree)]
    order = sorted(range(drafted), key=lambda node: (not forced[node], -gains[node]))  # parents come first among equals
    roots, measured = len(drafts), max(drafted, FULL_NODES)
    context = sum(draft.context for draft in drafts) // roots
    kinds = np.concatenate([np.full(roots - 1, Kind.ROOT), np.concatenate([kinds_of(draft.tree) for draft in drafts])[order]])
    slowdown = max(draft.work.slowdown for draft in drafts)
    costs = (slowdown * curve.of_rows(context, roots, roots + measured, kinds)[roots - 1 :]).tolist()  # with 0, 1, ... nodes
    drafting = sum(budget.draft_seconds or 0.0 for budget in budgets) + sum(draft.work.seconds for draft in drafts)
    best, rate, tokens = 0, 0.0 if forced[order[0]] else roots / (costs[0] + drafting), float(roots)
    for count, node in enumerate(order, start=1):
        tokens += gains[node]
        with_node = tokens / (costs[count] + drafting)  # tokens per second
        if with_node > rate or forced[node]:
            best, rate = count, with_node
    fewest = sum(forced)
    # Estimates have errors, and the best of many is probably overestimated, so a gain as small as that is none.
    if not fewest and rate * (costs[0] + drafting) < LEAST_GAIN * roots:
        best = 0
    worth = set(order[:best])
    kept = worth if most is None else set(order[: max(fewest, min(best, most))])
    break_even = rate * (costs[measured] - costs[0]) / measured  # the tokens that one more node must add
    gain = rate * costs[0] / roots
    choices, end = [], 0
    for draft, budget in zip(drafts, budgets, strict=True):
        start, end = end, end + len(draft.tree)
        next_nodes = requested(draft, budget, [node in worth for node in range(start, end)], gains[start:end], break_even)
        verified = [node in kept for node in range(start, end)]
        expected = 1 + sum(gains[node] for node in range(start, end) if node in kept)
        choices.append(Choice(pruned(draft.tree, verified), len(draft.tree), expected, gain, next_nodes, draft.work))
    return choices


def curve_of(budgets: Sequence[Budget]) -> CostCurve | None:
    """The machine's cost curve; None if no stream's nodes are chosen by it."""
    return next((budget.curve for budget in budgets if budget.curve is not None), None)


def forced_nodes(draft: Draft, budget: Budget) -> list[bool]:
    """Whether each of the N nodes must be verified: pruning by what was sampled would bias rejection sampling."""
    if draft.prunable and budget.curve is not None:
        return list(map(bool, draft.tree.drawn))
    return [True] * len(draft.tree)


def pruned(tree: DraftTree, kept: Sequence[bool]) -> DraftTree:
    """The kept ones of the N nodes."""
    if all(kept):
        return tree
    return tree.keep(np.array(kept)) if any(kept) else EMPTY


def requested(draft: Draft, budget: Budget, worth: Sequence[bool], gains: Sequence[float], break_even: float) -> int | None:
    """How many nodes the stream should draft from now on, by which of the N are worth verifying; None = as before."""
    if budget.curve is None or not draft.prunable or not gains:
        return None
    last_gain = min(gains) / break_even if break_even else math.inf
    return budget.next_nodes(sum(worth), len(worth), last_gain)


def outcome(draft: DraftTree, tokens: Ints) -> list[tuple[float, bool]]:
    """Compares a draft with the emitted tokens (int32 [A+1]).

    Returns, for each depth along the accepted path and its end, the probability that the draft gave to its next tokens
    together, and whether one of them was emitted. The list ends where the draft has no next token.
    """
    accepted = draft.follow(tokens).tolist()
    parents, probabilities = draft.parents.tolist(), draft.probability.tolist()
    found: list[tuple[float, bool]] = []
    for depth, parent in enumerate([-1, *accepted][: len(tokens)]):
        children = sum(probability for above, probability in zip(parents, probabilities, strict=True) if above == parent)
        if children > 0.0:
            found.append((children / (1.0 if parent < 0 else max(probabilities[parent], 1e-9)), depth < len(accepted)))
    return found
