"""How much of a draft is worth verifying: the nodes that bring the most tokens per second.

The likeliest n nodes of a draft cost what the machine's curve says and bring as many tokens as their path probabilities
add up to. Those probabilities are the drafter's own, so what it foretold is compared with what was emitted, also where
nothing of it was verified. Promises that drafting that does not pay stops within a few steps, and comes back as quickly.
"""

from __future__ import annotations

import numpy as np

from drafters.interface import EMPTY, MAX_NODES, DraftTree, Ints
from verify.cost import CostCurve

MEMORY = 0.9  # weight of earlier steps
PRIOR = 2.0  # foretold tokens that stand for trust at the start
STREAK = 8  # drafts in a row of which nothing was worth verifying, before the drafter is asked more rarely
FEWEST = 3  # nodes that are asked for
EASILY = 1.5  # times what a node must bring
GAIN = 1.02  # in tokens per second, for which a draft is pruned: that takes time, too
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

    def record(self, draft: DraftTree, verified: DraftTree, tokens: Ints, draft_seconds: float) -> None:
        """Of a draft, the pruned tree was verified, and `tokens` (int32 [A+1]) were emitted."""


class MeasuredBudget(FixedBudget):
    """The number of nodes that the machine's cost curve and the drafter's record call for."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(MAX_NODES)
        self._curve = curve
        self._costs, self._costs_at = curve.at(0), 0
        self._foretold, self._came = PRIOR, PRIOR  # tokens; decaying sums
        self._draft_seconds = 0.0  # decaying mean
        self._asked = MAX_NODES
        self._fruitless = 0  # drafts in a row of which nothing was worth verifying
        self._step = 0

    def ask(self) -> int:
        self._step += 1
        return self._asked if self._fruitless < STREAK or self._step % RARELY == 0 else 0

    def prune(self, tree: DraftTree, context: int) -> DraftTree:
        if not len(tree):
            return tree
        if abs(context - self._costs_at) > 64:
            self._costs, self._costs_at = self._curve.at(context), context
        order = np.argsort(-tree.probability, kind="stable")  # of equals, parents stand first
        trust = min(1.0, self._came / self._foretold)
        tokens = 1.0 + trust * np.concatenate([[0.0], np.cumsum(tree.probability[order], dtype=np.float64)])
        rates = tokens / (self._costs[: len(tokens)] + self._draft_seconds)
        best = int(np.argmax(rates))
        # What is drafted costs, too. Who fills what is asked for is asked for as much as was worth it, and for all where the
        # last node was so easily; who drafts less knows why.
        node_tokens = rates[best] * (self._costs[-1] - self._costs[0]) / MAX_NODES  # what a node must bring
        if best < len(tree) == self._asked:
            self._asked = max(FEWEST, best)
        elif best == len(tree) and trust * tree.probability[order[-1]] > EASILY * node_tokens:
            self._asked = MAX_NODES
        if rates[best] < GAIN * rates[-1]:
            return tree
        chosen = np.zeros(len(tree), np.bool_)
        chosen[order[:best]] = True
        return tree.keep(chosen) if best else EMPTY

    def record(self, draft: DraftTree, verified: DraftTree, tokens: Ints, draft_seconds: float) -> None:
        if not len(draft):
            return
        self._fruitless = 0 if len(verified) else self._fruitless + 1
        self._draft_seconds += (1 - MEMORY) * (draft_seconds - self._draft_seconds)
        foretold, came = outcome(draft, tokens)
        self._foretold = MEMORY * self._foretold + foretold
        self._came = MEMORY * self._came + came


def outcome(draft: DraftTree, tokens: Ints) -> tuple[float, int]:
    """Along the emitted tokens: the probability that the draft gave to its next tokens in all, and how many of them came."""
    parents, guesses, probability = draft.parents.tolist(), draft.tokens.tolist(), draft.probability.tolist()
    foretold, came, node, above = 0.0, 0, -1, 1.0
    for token in tokens.tolist():
        children = [row for row in range(node + 1, len(parents)) if parents[row] == node]
        foretold += sum(probability[row] for row in children) / max(above, 1e-9)
        hit = next((row for row in children if guesses[row] == token), None)
        if hit is None:
            break
        came, node, above = came + 1, hit, probability[hit]
    return foretold, came
