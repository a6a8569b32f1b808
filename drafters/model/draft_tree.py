"""`draft-tree`: a draft model's tree, level by level (TSD in GSD's terms, arXiv 2407.16207).

A node's children are the model's top k candidates. Nodes that are unlikely, absolutely or relative to their likeliest
sibling, are leaves (section 4.2). Each level takes one draft-model forward over its new rows. With k = 1 this is a
chain. Not in the paper: a level that is expected to cost more time than it saves is not drafted, and of its nodes only those
that pay are expanded.

`draft-graph`: GSD (section 5), in which recurring continuations are drafted once. A node is redundant if its last tau tokens
equal those of an expanded node that is not its ancestor. It is not expanded but merged with that node, so the tree becomes a
graph. For verification the graph is unrolled: the descendants of the expanded node are copied below the redundant one. A copy
is not a sample at its new position, so acceptance rules treat it as deterministic. The paper merges with the first node that
has these tokens, which may be a leaf and then continues nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from outrider.drafters.interface import (
    EMPTY,
    MAX_NODES,
    NO_WORK,
    NOTHING,
    Corpora,
    DraftTree,
    Draws,
    Floats,
    Ints,
    Sampling,
    Source,
    Verdict,
    arrange,
)
from outrider.drafters.model.expectation import FEW_UNREAD, Expectation
from outrider.drafters.model.language_model import Candidates, LanguageModel
from outrider.drafters.model.pair import FEW_TOKENS, Pair
from outrider.drafters.options import DraftGraphOptions, DraftTreeOptions
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State


@dataclass
class Node:
    """A node of the draft. `parent` is the index of another node, -1 for the root."""

    token: int
    parent: int
    depth: int
    rank: int  # rank among its siblings, by the model's own order
    share: float  # the model's probability, given the path before it
    path: float  # estimated probability that the whole path is accepted
    expands: bool  # likely enough to have children
    row: int = -1  # row of the model; -1 = not computed yet
    q: Floats | None = None  # float32 [V]; the distribution that its children were sampled from
    merged: bool = False  # copied from another branch


class DraftTreeDrafter:
    """A draft model's tree for one session. Implements `Drafter`."""

    feedback = 1  # the target's confidence tells kinds of text apart
    prunable = True

    def __init__(self, model: LanguageModel, options: DraftTreeOptions, pair: Pair) -> None:
        self._model = model
        self._options = options
        self._only_if_worth = options.only_if_worth  # levels that would cost more time than they save are not drafted
        self._pair = pair
        self._expectation = Expectation(pair, type(self).__name__)
        self._acceptance = self._expectation.acceptance
        self._sequence = Sequence()
        self._greedy = True
        self._nodes: list[Node] = []
        self._q: Floats | None = None  # float32 [V]; the distribution that the first level was sampled from
        self._work = NO_WORK  # of this step

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._sequence = sequence
        self._model.begin(sequence, sampling)
        self._greedy = sampling is None or sampling.greedy
        self._expectation.begin(sequence, sampling)
        self._acceptance = self._expectation.acceptance

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        self._nodes, self._q, self._work = [], None, NO_WORK
        budget = min(budget, self._model.space, MAX_NODES)
        self._expectation.start_step(self._model.unread)
        if budget <= 0 or not self._is_worth_starting():
            return EMPTY
        candidates = self._timed(lambda: self._model.root(self._options.children), 1)
        self._q = None if candidates.q is None else candidates.q[0]
        level = self._add(-1, candidates, 0, budget)
        for _ in range(1, self._options.steps):
            chosen = self._choose(level, budget)
            if not chosen:
                break
            level = self._grow(chosen, budget)
        self._work = self._pair.priced(self._work)
        return replace(self._tree(budget), work=self._work)

    def observe(self, verdict: Verdict) -> None:
        self._expectation.observe(verdict, self._work, EMPTY)
        self._learn(verdict)
        self._model.advance(verdict.tokens)

    def end(self) -> None:
        self._nodes, self._q = [], None

    def state(self) -> State:
        return self._expectation.state()

    def load(self, saved: State, text: Sequence) -> None:
        self._expectation.load(saved)

    def _is_worth_starting(self) -> bool:
        """Whether the first level is expected to pay, or may be a probe."""
        if not self._only_if_worth:
            return True
        share, seconds, unread = self._expectation.share, self._expectation.forward_seconds, self._model.unread
        reading = self._expectation.reading_seconds(unread)
        if self._expectation.repays_reading(unread):
            estimate, fixed = self._expectation.estimate(EMPTY.probability), reading if unread <= FEW_UNREAD else 0.0
            if self._pair.block > 1:
                rates = estimate.after_block(self._expectation.block(self._options.steps), seconds + fixed)
            else:
                rates = estimate.after_chain(share, share, share, seconds, fixed)
            if estimate.any_gains(rates):
                return True
        if not self._expectation.may_probe(unread, seconds):
            return False
        self._expectation.spend(reading + seconds)
        return True

    def _timed(self, forward: Callable[[], Candidates], rows: int) -> Candidates:
        """The result of a forward over `rows` new rows, whose time counts as drafting."""
        unread, started = self._model.unread, time.perf_counter()
        candidates = forward()
        seconds = time.perf_counter() - started
        if unread <= FEW_TOKENS:
            self._work = self._work._replace(seconds=self._work.seconds + seconds)
            if rows == 1:
                self._pair.record_forward(len(self._sequence), seconds, beside=False)
        else:
            self._work = self._work._replace(invested=self._work.invested + seconds)
        return candidates

    def _choose(self, level: list[int], budget: int) -> list[int]:
        """The nodes of a level to expand; none if the next level does not pay.

        Rejection sampling requires that this choice precedes the sampling of the children.
        """
        room = min(self._model.space, (self._limit(budget) - len(self._nodes)) // self._options.children)
        chosen = sorted(self._expandable(level), key=lambda node: -self._nodes[node].path)[: max(0, room)]
        if self._only_if_worth and chosen:
            chosen = chosen[: self._worth([self._nodes[node].path for node in chosen])]
        return sorted(chosen)

    def _worth(self, paths: list[float]) -> int:
        """How many nodes with these path probabilities, likeliest first, one forward should expand; 0 = it does not pay."""
        probability = np.array([node.path for node in self._nodes], np.float32)
        estimate = self._expectation.estimate(probability, self._work.seconds)
        share, best, worth = self._expectation.share, 0.0, 0
        for count, gain in enumerate(accumulate(paths), start=1):
            seconds = 0.0 if self._pair.block > 1 else self._expectation.forward_seconds + (count - 1) * self._pair.read_seconds
            if (rate := estimate.rate(gain * share, seconds, count)) > best and estimate.gains(gain * share, seconds, count):
                best, worth = rate, count
        return worth

    def _limit(self, budget: int) -> int:
        """The most nodes that are drafted. Of those that were not sampled for rejection sampling, the likeliest are kept."""
        return budget if self._q is not None else MAX_NODES * self._options.children

    def _expandable(self, level: list[int]) -> list[int]:
        """The nodes of a level that may have children."""
        return [node for node in level if self._nodes[node].expands]

    def _grow(self, chosen: list[int], budget: int) -> list[int]:
        """Adds the children of the chosen nodes, with one forward."""
        nodes = self._nodes
        first = 1 + sum(node.row >= 0 for node in nodes)
        parents = [0 if nodes[node].parent < 0 else nodes[nodes[node].parent].row for node in chosen]
        tokens = [nodes[node].token for node in chosen]
        candidates = self._timed(lambda: self._model.expand(tokens, parents, self._options.children), len(tokens))
        level: list[int] = []
        for number, node in enumerate(chosen):
            nodes[node].row = first + number
            nodes[node].q = None if candidates.q is None else candidates.q[number]
            level += self._add(node, candidates, number, budget)
        return level

    def _add(self, parent: int, candidates: Candidates, row: int, budget: int) -> list[int]:
        """Adds the candidates of a row as nodes; returns their indices."""
        tokens, shares = candidates.tokens[row].tolist(), candidates.probability[row].tolist()
        path, depth = (1.0, 0) if parent < 0 else (self._nodes[parent].path, self._nodes[parent].depth)
        estimates = [self._acceptance.calibration.acceptance(rank, share) for rank, share in enumerate(shares)]
        # A sample shares the target's noise, so its measured acceptance predicts better than its probability.
        likely = shares if self._greedy else estimates
        threshold = max(self._options.theta_prob, self._options.theta_sib * max(likely))
        added: list[int] = []
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            if share > 0 and len(self._nodes) < self._limit(budget):
                added.append(len(self._nodes))
                expands = likely[rank] >= threshold
                self._nodes.append(Node(token, parent, depth + 1, rank, share, path * estimates[rank], expands))
        return added

    def _tree(self, budget: int) -> DraftTree:
        nodes = self._nodes
        tree, order = arrange(
            tokens=[node.token for node in nodes],
            parents=[node.parent for node in nodes],
            probability=[node.path for node in nodes],
            source=[Source.MERGED if node.merged else Source.DRAFT for node in nodes],
        )
        if self._q is None:
            return tree.top(budget)
        row_of = {index: row for row, index in enumerate(order)}
        children: dict[int, list[int]] = {}
        for index, node in enumerate(nodes):
            children.setdefault(node.parent, []).append(row_of[index])
        sampled = {-1: self._q} | {index: node.q for index, node in enumerate(nodes) if node.q is not None}
        draws = {row_of.get(index, -1): Draws(q, tuple(children[index])) for index, q in sampled.items() if index in children}
        return replace(tree, draws=draws)

    def _learn(self, verdict: Verdict) -> None:
        """Calibrates with the target's choices along the emitted tokens, also at nodes that were not verified."""
        parent = -1
        for token in verdict.tokens.tolist():
            children = [index for index, node in enumerate(self._nodes) if node.parent == parent]
            if not children:
                return
            tokens = [self._nodes[index].token for index in children]
            accepted = tokens.index(token) if token in tokens else None
            self._expectation.learn(accepted == 0, self._nodes[children[0]].depth - 1)
            ranks, shares = zip(*((self._nodes[index].rank, self._nodes[index].share) for index in children), strict=True)
            self._acceptance.calibration.record(ranks, shares, accepted)
            if accepted is None:
                return
            parent = children[accepted]


class DraftGraphDrafter(DraftTreeDrafter):
    """GSD for one session. Implements `Drafter`."""

    def __init__(self, model: LanguageModel, options: DraftGraphOptions, pair: Pair) -> None:
        super().__init__(model, options, pair)
        self._tau = options.tau
        self._places: dict[tuple[int, ...], int] = {}  # the first expanded node with these last tau tokens
        self._merges: dict[int, int] = {}  # maps a redundant node to the expanded node that it is merged with

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        self._places, self._merges = {}, {}
        return super().propose(budget)

    def _choose(self, level: list[int], budget: int) -> list[int]:
        chosen = super()._choose(level, budget)
        for node in chosen:
            self._places.setdefault(self._ending(node), node)
        expanded = set(self._places.values())
        self._merges = {node: place for node, place in self._merges.items() if place in expanded}
        return chosen

    def _expandable(self, level: list[int]) -> list[int]:
        places = dict(self._places)
        # The likeliest node comes first: of several nodes of a level with the same ending, that one is expanded if any is.
        for node in sorted(super()._expandable(level), key=lambda node: -self._nodes[node].path):
            place = places.setdefault(self._ending(node), node)
            if place != node and place not in self._path(node):
                self._merges[node] = place
        return [node for node in super()._expandable(level) if node not in self._merges]

    def _tree(self, budget: int) -> DraftTree:
        self._unroll(self._limit(budget))
        return super()._tree(budget)

    def _unroll(self, budget: int) -> None:
        """Copies the descendants of merged nodes below the redundant ones, likeliest first, up to the budget."""
        children: dict[int, list[int]] = {}
        for index, node in enumerate(self._nodes):
            children.setdefault(node.parent, []).append(index)
        queue = list(self._merges.items())
        while queue and len(self._nodes) < budget:
            queue.sort(key=lambda pair: self._nodes[pair[0]].path)
            parent, merged = queue.pop()
            if self._nodes[parent].depth >= self._options.steps:
                continue
            for original in children.get(merged, [])[: budget - len(self._nodes)]:
                self._copy(original, parent)
                queue.append((len(self._nodes) - 1, self._merges.get(original, original)))

    def _copy(self, original: int, parent: int) -> None:
        """Appends a copy of node `original` as a child of `parent`."""
        node, above = self._nodes[original], self._nodes[parent]
        path = above.path * self._acceptance.calibration.acceptance(node.rank, node.share)
        self._nodes.append(replace(node, parent=parent, depth=above.depth + 1, path=path, row=-1, q=None, merged=True))

    def _ending(self, node: int) -> tuple[int, ...]:
        """The last tau tokens up to a node, committed ones included."""
        path = [self._nodes[index].token for index in self._path(node)[: self._tau]][::-1]
        missing = self._tau - len(path)
        return (*(self._sequence.tokens[-missing:].tolist() if missing else ()), *path)

    def _path(self, node: int) -> list[int]:
        """A node and its ancestors, deepest first."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self._nodes[node].parent
        return path
