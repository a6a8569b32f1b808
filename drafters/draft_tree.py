"""`draft` and `draft-tree`: what a draft model proposes, level by level (SSD and TSD in GSD's terms, arXiv 2407.16207).

A node's children are the model's first k candidates; those that are unlikely, or unlikely beside their best sibling, are not
expanded (section 4.2). One draft forward per level, over the new rows alone. With k = 1 that is plain speculative decoding.
Beyond the paper, a level that is expected to cost more than it brings is not drafted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafters.interface import EMPTY, MAX_NODES, NOTHING, DraftTree, Ints, Sampling, Source, Verdict
from drafters.model.calibration import Calibration
from drafters.model.language_model import Candidates, LanguageModel
from drafters.options import DraftTreeOptions
from drafters.policy import Worth, ema


@dataclass
class Node:
    """A guess. `parent` is the number of another node, -1 for the last committed token."""

    token: int
    parent: int
    depth: int
    rank: int  # among its siblings, by the model's own choice
    share: float  # the model's probability, given the path before it
    path: float  # estimated probability that the whole path is accepted
    expands: bool  # it is likely enough to have children
    row: int = -1  # of the model; -1 = it has not been there
    q: NDArray[np.float32] | None = None  # float32 [V]; what its children were drawn from
    merged: bool = False  # copied from another branch


class DraftTreeDrafter:
    """A draft model's tree for one session. Implements `Drafter`."""

    feedback = 0

    def __init__(self, model: LanguageModel, options: DraftTreeOptions) -> None:
        self._model = model
        self._options = options
        self._calibration = Calibration(options.children)
        self._text = NOTHING  # the last few committed tokens
        self._greedy = True
        self._nodes: list[Node] = []
        self._q: NDArray[np.float32] | None = None  # float32 [V]; what the first level was drawn from
        self._order: list[int] = []  # of the proposed tree's rows, the nodes
        self._worth = Worth()  # of a level
        self._first = 1.0  # tokens that the first level has brought; a decaying mean
        self._started = 0.0  # time of the step's beginning
        self.drafted_tokens = 0  # in all: nodes that the model proposed

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._model.begin(prompt, sampling)
        self._text = np.asarray(prompt, np.int32)[-8:]
        self._greedy = sampling is None or sampling.greedy

    def propose(self, budget: int) -> DraftTree:
        self._nodes, self._q, self._order = [], None, []
        budget = min(budget, self._model.space, MAX_NODES)
        self._started = time.perf_counter()
        if budget <= 0 or (self._options.thrifty and not self._worth.tried(self._first)):
            return EMPTY
        candidates = self._model.root(self._options.children)
        self._q = None if candidates.q is None else candidates.q[0]
        level = self._add(-1, candidates, 0, budget)
        for _ in range(1, self._options.steps):
            # Which nodes have children must not depend on what those are.
            room = budget - len(self._nodes)
            chosen = sorted(self._expandable(level), key=lambda node: -self._nodes[node].path)[: room // self._options.children]
            if not chosen or (self._options.thrifty and not self._worth.pays(sum(self._nodes[node].path for node in chosen))):
                break
            started = time.perf_counter()
            level = self._grow(sorted(chosen), budget)
            self._worth.took(time.perf_counter() - started)
        self.drafted_tokens += len(self._nodes)
        return self._tree(budget)

    def observe(self, verdict: Verdict) -> None:
        self._learn(verdict)
        self._text = np.concatenate([self._text, verdict.tokens])[-8:]
        self._model.advance(verdict.tokens)
        self._worth.emitted(len(verdict.tokens), time.perf_counter() - self._started)

    def end(self) -> None:
        pass

    def _expandable(self, level: Sequence[int]) -> list[int]:
        """Those of the newest nodes that get children."""
        return [node for node in level if self._nodes[node].expands]

    def _grow(self, chosen: Sequence[int], budget: int) -> list[int]:
        """The children of the chosen nodes, by one forward."""
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
        """The candidates of a row as nodes; returns their numbers."""
        tokens, shares = candidates.tokens[row].tolist(), candidates.probability[row].tolist()
        path, depth = (1.0, 0) if parent < 0 else (self._nodes[parent].path, self._nodes[parent].depth)
        estimates = [self._calibration.accepted(rank, share) for rank, share in enumerate(shares)]
        # The model draws with the target's noise: that it drew a token says more than the token's probability.
        likely = shares if self._greedy else estimates
        least = max(self._options.theta_prob, self._options.theta_sib * max(likely))
        added: list[int] = []
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            if share > 0 and len(self._nodes) < budget:
                added.append(len(self._nodes))
                self._nodes.append(Node(token, parent, depth + 1, rank, share, path * estimates[rank], likely[rank] >= least))
        return added

    def _tree(self, budget: int) -> DraftTree:
        """The nodes depth-first, siblings as they were drawn."""
        nodes = self._nodes
        self._order = depth_first([node.parent for node in nodes])
        row_of = {-1: -1} | {node: row for row, node in enumerate(self._order)}
        ordered = [nodes[node] for node in self._order]
        q = None
        if self._q is not None:
            nothing = np.zeros_like(self._q)
            q = np.stack([self._q, *(nothing if node.q is None else node.q for node in ordered)])
        return DraftTree(
            np.array([node.token for node in ordered], np.int32),
            np.array([row_of[node.parent] for node in ordered], np.int32),
            np.array([node.depth for node in ordered], np.int32),
            np.array([node.path for node in ordered], np.float32),
            np.array([Source.MERGED if node.merged else Source.DRAFT for node in ordered], np.uint8),
            q,
        )

    def _learn(self, verdict: Verdict) -> None:
        """What the target chose along the emitted tokens, of nodes that were not verified, too."""
        at = -1
        for token in verdict.tokens.tolist():
            children = [(number, node) for number, node in enumerate(self._nodes) if node.parent == at]
            if not children:
                return
            taken = next((place for place, (_, node) in enumerate(children) if node.token == token), None)
            if at < 0:
                self._first = ema(self._first, taken is not None)
            self._calibration.record([node.rank for _, node in children], [node.share for _, node in children], taken)
            if taken is None:
                return
            at = children[taken][0]


def depth_first(parents: Sequence[int]) -> list[int]:
    """Nodes (parents before children, -1 = the root's) in depth-first order, siblings in theirs."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    waiting = children.get(-1, [])[::-1]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += children.get(node, [])[::-1]
    return order
