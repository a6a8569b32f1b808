"""`draft-graph`: GSD, a draft model's tree in which recurring continuations are drafted once (arXiv 2407.16207, section 5).

A node is redundant if its last tau tokens equal those of an expanded node that is not its ancestor. It is not expanded but
merged with that node, so the tree becomes a graph. For verification the graph is unrolled: the descendants of the expanded node
are copied below the redundant one. A copy is not a sample at its new position, so acceptance rules treat it as deterministic.
The paper merges with the first node that has these tokens, which may be a leaf and then continues nothing.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.drafters.interface import DraftTree
from outrider.drafters.model.draft_tree import DraftTreeDrafter
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.model.pair import Pair
from outrider.drafters.options import DraftGraphOptions


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
