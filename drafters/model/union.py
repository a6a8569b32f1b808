"""`draft`, `pearl`, and `fusion` with a draft model: one tree of the tables' and the model's drafts.

The model is one more source with a price. Before a verification, `outrider.drafters.model.pair.Estimate` compares "one more
token from the model" with "verify now" by expected tokens and seconds, until verifying is better. A longer part of the text is
read first, once `Expectation` says that the rest of the answer repays it. Then the estimate decides whether the model also
drafts beside the verification. Tokens that the model sampled for rejection sampling are all kept, because dropping some by
their tokens would bias it. The tables' tokens fill the rest of the budget.

Without tables, and with a chain that is drafted beside each verification, this is PEARL (arXiv 2408.11850, Algorithm 2). Each
step verifies the current chain while the model extends it. If the emitted tokens agree with it, its rest is the next step's
draft (post-verify). If not, the next step verifies no draft while the model drafts anew, so the target's own token checks the
first draft token early (pre-verify).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from outrider.drafters.interface import (
    EMPTY,
    NO_WORK,
    NOTHING,
    Corpora,
    Drafter,
    DraftTree,
    Draws,
    Ints,
    Sampling,
    Verdict,
    Work,
    arrange,
)
from outrider.drafters.model.chain import LEAST_GUESS, ModelChain
from outrider.drafters.model.expectation import FEW_UNREAD, Expectation
from outrider.drafters.model.pair import Estimate, Pair, cost_of
from outrider.drafters.options import DraftTime
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, join, part

# A step reads at least this many tokens of a long text, and more if the time of a verification allows it.
READ_TOKENS = 64
# A probe ends after this many tokens, or at one that is probably wrong.
PROBE_TOKENS, PROBE_PATH = 4, 0.5


class UnionDrafter:
    """Tables and a draft model for one session. Implements `Drafter`."""

    prunable = True

    def __init__(
        self,
        tables: Drafter,
        chain: ModelChain,
        pair: Pair,
        longest: int,
        time: DraftTime = "auto",
        only_if_worth: bool = True,
    ) -> None:
        """Up to `longest` tokens are drafted before a verification, or exactly `longest` if `only_if_worth` is false."""
        self.feedback = max(1, tables.feedback)  # the target's confidence tells kinds of text apart
        self._tables = tables
        self._chain = chain
        self._pair = pair
        self._longest = longest
        self._time = time
        self._only_if_worth = only_if_worth
        self._sequence = Sequence()
        self._expectation = Expectation(pair, type(tables).__name__)  # of tokens that the tables lack
        self._table_tree = self._guide = EMPTY
        self._without = EMPTY  # what this step would verify without the draft model
        self._work = NO_WORK
        self._steps = 0  # of this request

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._tables.begin(sequence, prediction, sampling, corpora)
        self._chain.start(sequence, sampling)
        self._expectation.begin(sequence, sampling)
        self._sequence, self._steps = sequence, 0

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        self._work = NO_WORK
        self._expectation.start_step(self._chain.unread)
        tree = self._table_tree = self._without = self._tables.propose(budget, least)
        self._guide = self._chain.checked(tree)
        if budget <= 0 or not (len(self._chain) or self._chain.can_grow):
            return tree
        self._without = tree.top(self._expectation.estimate(tree.probability).nodes)
        if self._time != "during":
            self._draft(budget)
        tree = self._merged(budget)
        estimate = self._expectation.estimate(tree.probability, self._work.seconds)
        if self._time != "before" and (not self._only_if_worth or self._pays_beside(estimate)):
            self._work = self._work._replace(beside=True)
            alone = cost_of(len(tree), self._expectation.costs)
            tree = self._merged(budget, extends=True)
            self._chain.draft_beside(alone, self._guide)
        self._work = self._pair.priced(self._work)
        return replace(tree, work=self._work)

    def observe(self, verdict: Verdict) -> None:
        self._tables.observe(verdict)
        without = self._without if len(self._chain) or self._work.seconds else verdict.tree
        waited = self._chain.take_waited_seconds()
        learned = self._chain.observe(verdict)
        self._expectation.observe(verdict, self._work, without, (waited, self._chain.take_waited_seconds()))
        lacked = len(self._table_tree.follow(verdict.tokens))
        for number, (position, was_right) in enumerate(learned):
            if number >= lacked:  # the tables have no draft there
                self._expectation.learn(was_right, position)
        self._steps += 1

    def end(self) -> None:
        self._tables.end()
        self._chain.end()
        self._table_tree = EMPTY
        if self._steps:
            self._pair.record_answer(self._sequence.emitted)

    def state(self) -> State:
        return {**self._expectation.state(), **join(tables=self._tables.state())}

    def load(self, saved: State, text: Sequence) -> None:
        self._expectation.load(saved)
        self._tables.load(part(saved, "tables"), text)

    def _draft(self, budget: int) -> None:
        """Drafts while one more token is expected to save more time than it takes; otherwise maybe probes."""
        drafted, spent, invested, probes = 0, 0.0, 0.0, False
        while len(self._chain) < self._longest and self._chain.can_grow:
            estimate = self._expectation.estimate(self._merged(budget).probability, spent)
            if not probes and not self._pays(estimate):
                probes = not drafted and self._may_probe()
                if not probes:
                    break
            if probes and (drafted >= PROBE_TOKENS or self._chain.path < PROBE_PATH):
                break
            started, is_read = time.perf_counter(), self._read(estimate)
            begun = time.perf_counter()
            invested += begun - started
            if not is_read:
                break
            length = len(self._chain)
            self._chain.extend(self._longest - len(self._chain), self._guide)
            drafted += len(self._chain) - length
            seconds = time.perf_counter() - begun
            spent, invested = (spent, invested + seconds) if probes else (spent + seconds, invested)
        if probes:
            self._expectation.spend(invested)
        why = "to probe" if probes else f"right in {self._expectation.share:.2f}"
        reason = f"the draft model adds {drafted} tokens, {why}, in {1e3 * (spent + invested):.1f} ms"
        self._work = Work(spent, invested, reason=reason)

    def _pays(self, estimate: Estimate) -> bool:
        """Whether one more forward of the model is expected to pay."""
        if not self._only_if_worth:
            return True
        share, unread = self._expectation.share, self._chain.unread
        if not self._expectation.repays_reading(unread):
            return False
        fixed = self._expectation.reading_seconds(unread) if unread <= FEW_UNREAD else 0.0
        if self._pair.block > 1:
            paths = np.array(self._expectation.block(self._longest))
            covered = np.bincount(self._table_tree.depths, self._table_tree.probability, len(paths) + 1)[1 : len(paths) + 1]
            gains = paths * np.maximum(0, 1 - covered)  # expected tokens beyond the tables', by depth
            return estimate.any_gains(estimate.after_block(gains.tolist(), fixed + self._expectation.forward_seconds))
        guessed = self._guide.likeliest(self._chain.tokens, LEAST_GUESS)
        found = prospect(self._table_tree, guessed, self._chain.tokens, self._chain.path, share)
        if guessed:
            fixed += len(guessed) * self._pair.read_seconds + (0.0 if len(self._chain) else self._expectation.forward_seconds)
        forward = self._expectation.forward_seconds
        return estimate.any_gains(estimate.after_chain(found.gain, found.path, share, forward, fixed))

    def _may_probe(self) -> bool:
        """Whether a draft that is not expected to pay may show more about the model."""
        seconds = max(1, PROBE_TOKENS // self._pair.block) * self._expectation.forward_seconds
        return not len(self._chain) and self._expectation.may_probe(self._chain.unread, seconds)

    def _read(self, estimate: Estimate) -> bool:
        """Reads a chunk of a long text; returns whether only few of its tokens are unread."""
        if not self._only_if_worth:
            return True  # the first draft reads it
        if self._chain.unread > FEW_UNREAD:
            pace = self._pair.read_seconds
            self._chain.read(max(READ_TOKENS, int(estimate.seconds / pace) if pace else READ_TOKENS))
        return self._chain.unread <= FEW_UNREAD

    def _pays_beside(self, estimate: Estimate) -> bool:
        """Whether drafting beside the verification is expected to save more time than it takes.

        What is drafted there is of use if the whole chain is accepted and the next token is right.
        """
        if not self._chain.can_grow or self._chain.unread > FEW_UNREAD:
            return False
        pair, share, seconds = self._pair, self._expectation.share, estimate.seconds - estimate.drafting
        forward = self._expectation.forward_seconds
        token_seconds, value, path = estimate.seconds / estimate.tokens, 0.0, self._chain.path * share
        beside = int(pair.tokens_beside(seconds, len(self._sequence)))
        if pair.block == 1:
            for _ in range(beside - 1):
                value += path * min(forward, share * token_seconds)
        elif beside >= pair.block:  # what remains of a block saves the next forward
            value = min(path * forward, sum(self._expectation.block(self._longest)[1:]) * token_seconds)
        waiting = forward * pair.draft_slowdown / 2
        return value > seconds * (pair.target_slowdown - 1) + waiting

    def _merged(self, budget: int, extends: bool = False) -> DraftTree:
        """The tree of both. `extends` if the model goes on beside the verification."""
        if not len(self._chain) and not extends:
            return self._table_tree
        return merge(self._table_tree, self._chain.tree(budget), budget)


class Prospect(NamedTuple):
    """What a forward of the draft model may add."""

    gain: float  # expected tokens beyond the tables'
    path: float  # probability that what the forward adds is accepted


def prospect(tables: DraftTree, guessed: list[int], tokens: list[int], path: float, share: float) -> Prospect:
    """What a forward adds below the chain of `tokens`, whose path has the probability `path`.

    It checks the tokens `guessed`, the tables' likeliest path below the chain, and adds the model's own token at the first
    difference or after the end. Where the tables lack the right token, the model has it with the probability `share`.
    """
    above = tables.follow(np.array(tokens, np.int32))
    if len(above) < len(tokens):
        return Prospect(path * share, path * share)
    first = int(above[-1]) if len(above) else -1
    base = float(tables.probability[first]) if first >= 0 else 1.0
    likely = tables.probability[first + 1 : first + 1 + len(guessed)].astype(np.float64)
    reached = np.minimum(1.0, np.r_[base, likely] / max(base, 1e-6))  # each guess, after the chain
    children = np.bincount(tables.parents + 1, tables.probability, len(tables) + 1)[first + 1 : first + 2 + len(guessed)]
    covered = np.minimum(reached, children / max(base, 1e-6))
    gain = share * float(np.sum(reached - covered))
    return Prospect(path * gain, path * float(covered[-1] + share * (reached[-1] - covered[-1])))


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
