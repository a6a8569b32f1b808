"""`draft` and `draft-tree`: a draft model's chain or tree, level by level (SSD and TSD in GSD's terms, arXiv 2407.16207).

A node's children are the model's top k candidates. Nodes that are unlikely, absolutely or relative to their likeliest
sibling, are leaves (section 4.2). Each level takes one draft-model forward over its new rows. With k = 1 this is a
chain, plain speculative decoding. Not in the paper: a level that is expected to cost more time than it saves is not drafted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from outrider.drafters.interface import (
    EMPTY,
    MAX_NODES,
    NOTHING,
    DraftTree,
    Draws,
    Floats,
    Ints,
    Sampling,
    Source,
    Verdict,
    arrange,
)
from outrider.drafters.model.language_model import Candidates, LanguageModel
from outrider.drafters.options import DraftTreeOptions
from outrider.drafters.policy import Calibration, CostBenefit, ema
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, array, join, numbers, part


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

    feedback = 0
    prunable = True

    def __init__(self, model: LanguageModel, options: DraftTreeOptions) -> None:
        self._model = model
        self._options = options
        self._only_if_worth = options.only_if_worth  # levels that would cost more time than they save are not drafted
        self._calibration = Calibration(options.children)
        self._sequence = Sequence()
        self._greedy = True
        self._nodes: list[Node] = []
        self._q: Floats | None = None  # float32 [V]; the distribution that the first level was sampled from
        self._level_benefit = CostBenefit()
        self._first_gain = 1.0  # accepted tokens of the first level (EMA)
        self._started = 0.0  # time.perf_counter() at the start of the step

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._sequence = sequence
        self._model.begin(sequence, sampling)
        self._greedy = sampling is None or sampling.greedy

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        self._nodes, self._q = [], None
        budget = min(budget, self._model.space, MAX_NODES)
        self._started = time.perf_counter()
        if budget <= 0 or (self._only_if_worth and not self._level_benefit.is_worth_or_probe(self._first_gain)):
            return EMPTY
        candidates = self._model.root(self._options.children)
        self._q = None if candidates.q is None else candidates.q[0]
        level = self._add(-1, candidates, 0, budget)
        for _ in range(1, self._options.steps):
            chosen = self._choose(level, budget)
            if not chosen:
                break
            started = time.perf_counter()
            level = self._grow(chosen, budget)
            self._level_benefit.record_action(time.perf_counter() - started)
        return self._tree(budget)

    def observe(self, verdict: Verdict) -> None:
        self._learn(verdict)
        self._model.advance(verdict.tokens)
        self._level_benefit.record_step(len(verdict.tokens), time.perf_counter() - self._started)

    def end(self) -> None:
        self._nodes, self._q = [], None

    def state(self) -> State:
        parts = join(calibration=self._calibration.state(), level=self._level_benefit.state())
        return {"first_gain": numbers(self._first_gain), **parts}

    def load(self, saved: State, text: Sequence) -> None:
        self._first_gain = float(array(saved, "first_gain", np.float64, 1)[0])
        self._calibration.load(part(saved, "calibration"))
        self._level_benefit.load(part(saved, "level"))

    def _choose(self, level: list[int], budget: int) -> list[int]:
        """The nodes of a level to expand; none if the next level does not pay.

        Rejection sampling requires that this choice precedes the sampling of the children.
        """
        room = (budget - len(self._nodes)) // self._options.children
        chosen = sorted(self._expandable(level), key=lambda node: -self._nodes[node].path)[:room]
        gain = sum(self._nodes[node].path for node in chosen)
        return sorted(chosen) if not self._only_if_worth or self._level_benefit.is_worth(gain) else []

    def _expandable(self, level: list[int]) -> list[int]:
        """The nodes of a level that may have children."""
        return [node for node in level if self._nodes[node].expands]

    def _grow(self, chosen: list[int], budget: int) -> list[int]:
        """Adds the children of the chosen nodes, with one forward."""
        nodes = self._nodes
        first = 1 + sum(node.row >= 0 for node in nodes)
        parents = [0 if nodes[node].parent < 0 else nodes[nodes[node].parent].row for node in chosen]
        candidates = self._model.expand([nodes[node].token for node in chosen], parents, self._options.children)
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
        estimates = [self._calibration.acceptance(rank, share) for rank, share in enumerate(shares)]
        # A sample shares the target's noise, so its measured acceptance predicts better than its probability.
        likely = shares if self._greedy else estimates
        threshold = max(self._options.theta_prob, self._options.theta_sib * max(likely))
        added: list[int] = []
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            if share > 0 and len(self._nodes) < budget:
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
            return tree
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
            if parent < 0:
                self._first_gain = ema(self._first_gain, accepted is not None)
            ranks, shares = zip(*((self._nodes[index].rank, self._nodes[index].share) for index in children), strict=True)
            self._calibration.record(ranks, shares, accepted)
            if accepted is None:
                return
            parent = children[accepted]
