"""How much of a draft is worth verifying: the nodes that bring the most tokens per second.

The likeliest n nodes of a draft cost what the machine's curve says and bring as many tokens as their path probabilities
add up to. Those probabilities are the drafter's own, so what they promised is compared with what came of it. Promises
that drafting that does not pay stops within a few steps, and is tried again now and then.
"""

from __future__ import annotations

import numpy as np

from drafters.draft import EMPTY, MAX_NODES, DraftTree
from verify.cost import CostCurve

MEMORY = 0.9  # weight of earlier steps
PRIOR = 2.0  # promised tokens that stand for trust at the start
STREAK = 8  # drafts in a row that were not worth verifying, before the drafter is no longer asked
LONGEST_PAUSE = 32  # steps


class FixedBudget:
    """Always the same number of nodes."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def ask(self) -> int:
        """How many nodes the drafter may propose now."""
        return self._nodes

    def prune(self, tree: DraftTree, context: int) -> DraftTree:
        """The part of the draft that is worth verifying after `context` tokens."""
        return tree

    def saw(self, tree: DraftTree, accepted: int, draft_seconds: float) -> None:
        """A pruned tree has been verified."""


class MeasuredBudget(FixedBudget):
    """The number of nodes that the machine's cost curve and the drafter's record call for."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(MAX_NODES)
        self._curve = curve
        self._costs, self._costs_at = curve.at(0), 0
        self._promised, self._accepted = PRIOR, PRIOR  # tokens; decaying sums
        self._draft_seconds = 0.0  # decaying mean
        self._asked = False  # in this step
        self._fruitless = 0  # drafts in a row that brought nothing
        self._pause, self._waiting = 0, 0  # steps without asking: the last time, and still to come

    def ask(self) -> int:
        self._asked = not self._waiting
        if self._asked:
            return MAX_NODES
        self._waiting -= 1
        if not self._waiting:  # then once more, with half the trust of the start
            self._promised, self._accepted = PRIOR, PRIOR / 2
        return 0

    def prune(self, tree: DraftTree, context: int) -> DraftTree:
        if not len(tree):
            return tree
        if abs(context - self._costs_at) > 64:
            self._costs, self._costs_at = self._curve.at(context), context
        order = np.argsort(-tree.probability, kind="stable")  # of equals, parents stand first
        trust = min(1.0, self._accepted / self._promised)
        tokens = 1.0 + trust * np.concatenate([[0.0], np.cumsum(tree.probability[order], dtype=np.float64)])
        best = int(np.argmax(tokens / (self._costs[: len(tokens)] + self._draft_seconds)))
        if best == len(tree):
            return tree
        chosen = np.zeros(len(tree), np.bool_)
        chosen[order[:best]] = True
        return tree.keep(chosen) if best else EMPTY

    def saw(self, tree: DraftTree, accepted: int, draft_seconds: float) -> None:
        if not self._asked:
            return
        self._draft_seconds += (1 - MEMORY) * (draft_seconds - self._draft_seconds)
        if len(tree):
            self._promised = MEMORY * self._promised + float(tree.probability.sum())
            self._accepted = MEMORY * self._accepted + accepted
        if accepted:
            self._fruitless = self._pause = 0
            return
        self._fruitless += 1
        if self._fruitless >= STREAK:
            self._pause = self._waiting = min(LONGEST_PAUSE, 2 * self._pause + 1)
