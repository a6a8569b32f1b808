"""`pearl`, and `fusion` with a draft model: one tree of the tables' and the model's drafts.

The model's chain is drafted before a verification or during it, or not at all (`outrider.drafters.model.schedule`). A step
without a chain verifies the tables' tree alone, so none is without a draft. Tokens that the model sampled for rejection
sampling are all kept, because dropping some by their tokens would bias it. The tables' tokens fill the rest of the budget.

Without tables, and with a chain that is drafted during each verification, this is PEARL (arXiv 2408.11850, Algorithm 2). Each
step verifies the current chain while the model extends it. If the emitted tokens agree with it, its rest is the next step's
draft (post-verify). If not, the next step verifies no draft while the model drafts anew, so the target's own token checks the
first draft token early (pre-verify).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from outrider.drafters.interface import EMPTY, NOTHING, Drafter, DraftTree, Draws, Ints, Sampling, Verdict, arrange
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.schedule import ModelWork, Schedule, Schedules
from outrider.drafters.options import DraftTime
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, join, part


class UnionDrafter:
    """Tables and a draft model for one session. Implements `Drafter`."""

    prunable = True

    def __init__(
        self, tables: Drafter, chain: ModelChain, schedules: Schedules, longest: int, time: DraftTime = "auto"
    ) -> None:
        """`longest` bounds the number of tokens that are drafted before a verification."""
        self.feedback = tables.feedback
        self._tables = tables
        self._chain = chain
        self._schedules = schedules
        self._schedule: Schedule = schedules.of(True)
        self._longest = longest
        self._time = time
        self._sequence = Sequence()
        self._sampling: Sampling | None = None
        self._has_begun = False  # whether the chain has begun: with the request, or when it is first used
        self._has_drafted = False  # whether this request has drafted; its first draft includes the reading of the prompt
        self._work = ModelWork()
        self._had_chain = False  # whether there was a chain at the start of the step
        self._table_tree = EMPTY
        self._drafted_during = False  # whether the model drafted during the last step
        self._started = 0.0  # time.perf_counter() at the start of the step
        self._draft_seconds = 0.0  # seconds of drafting before this verification

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._tables.begin(sequence, prediction, sampling)
        self._sequence, self._sampling = sequence, sampling
        self._schedule = self._schedules.of(sampling is None or sampling.greedy)
        self._has_begun = self._has_drafted = False
        self._drafted_during = False
        if self._time != "auto" or self._schedule.was_worth_lately:
            self._begin_chain()

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        self._started, self._draft_seconds = time.perf_counter(), 0.0
        tree = self._table_tree = self._tables.propose(budget)
        self._had_chain = len(self._chain) > 0
        self._work = self._choose() if budget > 0 else ModelWork()
        if self._work.before or self._work.during:
            self._begin_chain()
        if self._work.before:
            self._draft_before(tree)
        if len(self._chain) or self._work.during:
            tree = merge(tree, self._chain.tree(budget), budget)
        if self._work.during:
            self._chain.draft_during(self._table_tree)
        return tree

    def observe(self, verdict: Verdict) -> None:
        gain = 0
        if self._had_chain or self._work.before:
            gain = max(0, len(verdict.path) - len(self._table_tree.follow(verdict.tokens[:-1])))
        self._tables.observe(verdict)
        if self._work.before or self._work.during or len(self._chain):
            self._chain.observe(verdict)
        else:
            self._has_begun = False  # it reads the tokens in between when it is used again
        self._record(gain, len(verdict.tokens), time.perf_counter() - self._started)

    def end(self) -> None:
        self._tables.end()
        self._chain.end()
        self._table_tree = EMPTY

    def state(self) -> State:
        return join(tables=self._tables.state(), chain=self._chain.state())

    def load(self, saved: State, text: Sequence) -> None:
        self._tables.load(part(saved, "tables"), text)
        self._chain.load(part(saved, "chain"), text)

    def _begin_chain(self) -> None:
        """Begins the chain, unless it has begun in this request."""
        if not self._has_begun:
            self._chain.start(self._sequence, self._sampling)
            self._has_begun = True

    def _choose(self) -> ModelWork:
        if self._time == "auto":
            return self._schedule.choose(self._had_chain)
        return ModelWork(self._time == "before" and not self._had_chain, self._time == "during")

    def _draft_before(self, tree: DraftTree) -> None:
        """Drafts tokens that are expected to save more time than they cost."""
        started, token_seconds = time.perf_counter(), self._schedule.token_seconds
        least = (self._chain.draft_seconds or 0.0) / token_seconds if token_seconds else 0.0
        self._chain.draft(self._longest, least, tree)
        self._draft_seconds = time.perf_counter() - started

    def _record(self, gain: int, tokens: int, seconds: float) -> None:
        """Records a step of `seconds` that emitted `tokens` tokens, `gain` of them more than the tables' tree has."""
        schedule, choice = self._schedule, self._work
        drafts = choice.before or choice.during
        is_first, self._has_drafted = drafts and not self._has_drafted, self._has_drafted or drafts
        if not is_first:
            schedule.record_tokens(tokens, seconds)
        if self._time != "auto":
            return
        schedule.record_probe(choice, seconds)
        if self._drafted_during:
            # Without this chain, the model might have drafted another one before the verification.
            saved = gain - schedule.net_of_before if self._had_chain else 0.0
            schedule.record_during(saved)
        if choice.before:
            schedule.record_before(gain, 0.0 if is_first else self._draft_seconds)
        if not is_first:
            schedule.record_step(choice.during, seconds - self._draft_seconds)
        self._drafted_during = choice.during


def merge(left: DraftTree, right: DraftTree, budget: int) -> DraftTree:
    """One tree of at most `budget` nodes: the nodes of `right` that were sampled, then the likeliest of both trees.

    A node in both trees gets the larger probability. `right` has at most `budget` nodes.
    """
    index_of: dict[tuple[int, int], int] = {}  # index in `found`, by the parent's index and the token
    found: list[tuple[float, int, int]] = []  # probability, depth, source
    indices: dict[int, int] = {}
    for tree in (left, right):
        indices = {-1: -1}  # maps the tree's rows to indices in `found`
        columns = (tree.tokens, tree.parents, tree.depths, tree.probability, tree.source)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for row, (token, parent, depth, probability, source) in enumerate(rows):
            index = indices[row] = index_of.setdefault((indices[parent], token), len(found))
            if index == len(found):
                found.append((probability, depth, source))
            elif probability > found[index][0]:
                found[index] = probability, depth, source
    keys = list(index_of)
    sampled = {indices[row] for row in np.flatnonzero(right.drawn).tolist()}
    order = sorted(range(len(found)), key=lambda index: (index not in sampled, -found[index][0], found[index][1]))
    likeliest = order[:budget]
    position = {-1: -1} | {index: number for number, index in enumerate(likeliest)}  # parents precede their children
    tree, nodes = arrange(
        tokens=[keys[index][1] for index in likeliest],
        parents=[position[keys[index][0]] for index in likeliest],
        probability=[found[index][0] for index in likeliest],
        source=[found[index][2] for index in likeliest],
    )
    row_of = {likeliest[node]: row for row, node in enumerate(nodes)} | {-1: -1}
    draws = {
        row_of[indices[parent]]: Draws(drawn.q, tuple(row_of[indices[row]] for row in drawn.rows))
        for parent, drawn in right.draws.items()
    }
    return replace(tree, draws=draws, continuation=right.continuation)
