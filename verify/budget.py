"""How much of a draft is worth verifying: the nodes that bring the most tokens per second.

The likeliest n nodes of a draft cost what the machine's curve says and bring as many tokens as their path probabilities
add up to. Those probabilities are the drafter's own, so what it foretold is compared with what was emitted, also where
nothing of it was verified. Promises that drafting that does not pay stops within a few steps, and comes back as quickly.
"""

from __future__ import annotations

import numpy as np

from drafters.draft import EMPTY, MAX_NODES, DraftTree, Ints
from verify.cost import CostCurve

MEMORY = 0.9  # weight of earlier steps
PRIOR = 2.0  # foretold tokens that stand for trust at the start
STREAK = 8  # drafts in a row of which nothing was worth verifying, before the drafter is asked more rarely
RARELY = 4  # then in one step of so many


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

    def saw(self, draft: DraftTree, verified: DraftTree, tokens: Ints, draft_seconds: float) -> None:
        """Of a draft, the pruned tree was verified, and `tokens` (int32 [A+1]) were emitted."""


class MeasuredBudget(FixedBudget):
    """The number of nodes that the machine's cost curve and the drafter's record call for."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(MAX_NODES)
        self._curve = curve
        self._costs, self._costs_at = curve.at(0), 0
        self._foretold, self._came = PRIOR, PRIOR  # tokens; decaying sums
        self._draft_seconds = 0.0  # decaying mean
        self._fruitless = 0  # drafts in a row of which nothing was worth verifying
        self._step = 0

    def ask(self) -> int:
        self._step += 1
        return MAX_NODES if self._fruitless < STREAK or self._step % RARELY == 0 else 0

    def prune(self, tree: DraftTree, context: int) -> DraftTree:
        if not len(tree):
            return tree
        if abs(context - self._costs_at) > 64:
            self._costs, self._costs_at = self._curve.at(context), context
        order = np.argsort(-tree.probability, kind="stable")  # of equals, parents stand first
        trust = min(1.0, self._came / self._foretold)
        tokens = 1.0 + trust * np.concatenate([[0.0], np.cumsum(tree.probability[order], dtype=np.float64)])
        best = int(np.argmax(tokens / (self._costs[: len(tokens)] + self._draft_seconds)))
        if best == len(tree):
            return tree
        chosen = np.zeros(len(tree), np.bool_)
        chosen[order[:best]] = True
        return tree.keep(chosen) if best else EMPTY

    def saw(self, draft: DraftTree, verified: DraftTree, tokens: Ints, draft_seconds: float) -> None:
        if not len(draft):
            return
        self._fruitless = 0 if len(verified) else self._fruitless + 1
        self._draft_seconds += (1 - MEMORY) * (draft_seconds - self._draft_seconds)
        foretold, came = outcome(draft, tokens)
        self._foretold = MEMORY * self._foretold + foretold
        self._came = MEMORY * self._came + came


def outcome(draft: DraftTree, tokens: Ints) -> tuple[float, int]:
    """Along the emitted tokens: the probability that the draft gave to its next tokens in all, and how many of them came."""
    foretold, came, node = 0.0, 0, -1
    for token in tokens:
        children = np.flatnonzero(draft.parents == node)
        above = 1.0 if node < 0 else max(float(draft.probability[node]), 1e-9)
        foretold += float(draft.probability[children].sum()) / above
        hit = children[draft.tokens[children] == token]
        if not len(hit):
            break
        came, node = came + 1, int(hit[0])
    return foretold, came
