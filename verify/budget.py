"""Chooses the draft nodes that a round verifies: the subtrees of all streams with the most expected tokens per second.

The cost of the likeliest n nodes comes from the machine's cost curve; their expected tokens are the sum of their path
probabilities, times the trust in the stream's drafter. So drafting that does not pay stops within a few steps, and resumes
after a probe that pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, MAX_NODES, DraftTree, Ints
from outrider.drafters.policy import Probe, Trust, ema
from outrider.verify.cost import CostCurve

HOPE = 1.2  # gain that drafting is assumed to have at first: it stops after some 20 drafts without any
LEAST_GAIN = 1.02  # with which drafting goes on: choosing nodes and ranking the model's own candidates take time, too
PROBE_INTERVAL = 4  # steps between two drafts while drafting does not pay; doubles up to LONGEST_INTERVAL
LONGEST_INTERVAL = 8
PLAIN_INTERVAL = 16  # steps between two without a draft while drafting pays a little: they show what it is compared with
CLEAR_GAIN = 1.5  # with which no such steps are needed
MIN_NODES = 3  # in the smallest draft that is requested
FULL_NODES = 64  # requested at first; more only if a draft of as many clearly pays
FULL_BUDGET_GAIN = 1.5  # gain over break-even that restores the full budget, and then doubles it


@dataclass(frozen=True)
class Selection:
    """The part of a draft that is verified."""

    tree: DraftTree
    next_nodes: int | None = None  # number of nodes to request from the next step on; None = unchanged
    gain: float = 1.0  # expected tokens per second of the round, drafting included, over those without drafts


class Budget(Protocol):
    """Decides how many nodes of one stream are drafted; `share` decides how many are verified."""

    def nodes(self) -> int:
        """The number of nodes that the drafter may propose in this step. Called once per step."""

    def record(self, draft: DraftTree, selection: Selection, tokens: Ints, draft_seconds: float) -> None:
        """Records one step's outcome: the emitted tokens (int32 [A+1]) and the seconds that drafting took."""


class FixedBudget:
    """The same number of nodes in every step. Implements `Budget`."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def nodes(self) -> int:
        return self._nodes

    def record(self, draft: DraftTree, selection: Selection, tokens: Ints, draft_seconds: float) -> None:
        pass


class MeasuredBudget:
    """Chooses the nodes by the machine's cost curve and the drafter's past acceptance. Implements `Budget`."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.draft_seconds = 0.0  # per draft (EMA)
        self._trust = Trust()
        self._has_drafted = False
        self._most = curve.nodes[-1]
        self._requested = min(FULL_NODES, self._most)
        self._gain = HOPE  # of drafting (EMA)
        self._probe = Probe(PROBE_INTERVAL, LONGEST_INTERVAL)
        self._plain = Probe(PLAIN_INTERVAL)

    @property
    def trust(self) -> float:
        """The factor by which the drafter's probabilities have come true."""
        return self._trust.factor

    def nodes(self) -> int:
        if self._gain >= LEAST_GAIN:
            self._probe.reset()
            return 0 if self._gain < CLEAR_GAIN and self._plain.due() else self._requested
        return self._requested if self._probe.due() else 0

    def record(self, draft: DraftTree, selection: Selection, tokens: Ints, draft_seconds: float) -> None:
        if not len(draft):
            return
        self._requested = selection.next_nodes or self._requested
        self._gain = ema(self._gain, selection.gain)
        if self._has_drafted:  # the first draft of a request includes the draft model's reading of the prompt
            self.draft_seconds = ema(self.draft_seconds, draft_seconds)
        self._has_drafted = True
        self._trust.record(*outcome(draft, tokens))

    def next_nodes(self, useful: int, drafted: int, last_gain: float) -> int | None:
        """A drafter that fills its budget gets only the useful size next time, or more nodes if the last one clearly paid.

        `last_gain` is the gain of the draft's last node over break-even.
        """
        if useful < drafted == self._requested:
            return max(MIN_NODES, useful)
        if useful < drafted or last_gain <= FULL_BUDGET_GAIN:
            return None
        return min(self._most, max(FULL_NODES, self._requested * (2 if drafted == self._requested else 1)))


@dataclass(frozen=True)
class Offer:
    """One stream's draft for a round."""

    draft: DraftTree
    budget: Budget
    context: int  # tokens before the draft
    prunable: bool = True

    def kept(self) -> NDArray[np.bool_]:
        """The nodes that must be verified, bool [N]: pruning by what was sampled would bias rejection sampling."""
        if self.prunable and isinstance(self.budget, MeasuredBudget):
            return self.draft.drawn
        return np.ones(len(self.draft), np.bool_)


def share(offers: Sequence[Offer], most: int | None = None) -> list[Selection]:
    """The nodes to verify of each stream in one round: those with which the round emits the most tokens per second.

    `most` bounds their number where the round also reads a prompt. Has no side effects.
    """
    drafted = sum(len(offer.draft) for offer in offers)
    measured = [offer.budget for offer in offers if isinstance(offer.budget, MeasuredBudget)]
    if not drafted or not measured:
        return [Selection(offer.draft) for offer in offers]
    forced = np.concatenate([offer.kept() for offer in offers])
    if forced.all():
        return [Selection(offer.draft) for offer in offers]
    gains = np.concatenate([trust_of(offer.budget) * offer.draft.probability for offer in offers])
    order = np.lexsort((-gains, ~forced))  # equal nodes keep their order, so parents come first
    context = sum(offer.context for offer in offers) // len(offers)
    roots = len(offers)
    costs = measured[0].curve.of_rows(context, roots, roots + max(drafted, MAX_NODES))[roots - 1 :]
    tokens = len(offers) + np.concatenate([[0.0], np.cumsum(gains[order], dtype=np.float64)])
    # Tokens per second, by number of nodes.
    rates = tokens / (costs[: drafted + 1] + sum(budget.draft_seconds for budget in measured))
    fewest = int(forced.sum())
    best = fewest + int(np.argmax(rates[fewest:]))
    kept, worth = np.zeros((2, drafted), np.bool_)
    worth[order[:best]] = True
    kept[order[: best if most is None else max(fewest, min(best, most))]] = True
    most = max(drafted, FULL_NODES)
    break_even = rates[best] * (costs[most] - costs[0]) / most  # tokens that one more node must add
    gain = float(rates[best] * costs[0]) / roots
    selections, end = [], 0
    for offer in offers:
        start, end = end, end + len(offer.draft)
        next_nodes = requested(offer, worth[start:end], gains[start:end], break_even)
        selections.append(Selection(pruned(offer.draft, kept[start:end]), next_nodes, gain))
    return selections


def pruned(draft: DraftTree, kept: NDArray[np.bool_]) -> DraftTree:
    """The kept nodes (bool [N])."""
    if kept.all():
        return draft
    return draft.keep(kept) if kept.any() else EMPTY


def requested(offer: Offer, worth: NDArray[np.bool_], gains: NDArray[np.float64], break_even: float) -> int | None:
    """How many nodes the stream should draft from now on, by those that are worth verifying (bool [N]); None = as before."""
    if not (isinstance(offer.budget, MeasuredBudget) and len(gains) and offer.prunable):
        return None
    last_gain = float(gains.min()) / break_even if break_even else np.inf
    return offer.budget.next_nodes(int(worth.sum()), len(worth), last_gain)


def trust_of(budget: Budget) -> float:
    """The factor by which a stream's probabilities have come true."""
    return budget.trust if isinstance(budget, MeasuredBudget) else 1.0


def outcome(draft: DraftTree, tokens: Ints) -> tuple[float, int]:
    """Compares a draft with the emitted tokens (int32 [A+1]).

    Returns the probability that the draft gave to the next token, summed over the accepted path and its end, and the
    number of drafted tokens that were emitted.
    """
    rows = draft.follow(tokens)
    parents = [-1, *rows.tolist()][: len(tokens)]
    expected = 0.0
    for parent in parents:
        above = 1.0 if parent < 0 else float(draft.probability[parent])
        expected += float(draft.probability[draft.parents == parent].sum()) / max(above, 1e-9)
    return expected, len(rows)
