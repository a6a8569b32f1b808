"""`draft-graph`: GSD, a draft model's tree in which what recurs is drafted once (arXiv 2407.16207, section 5).

A node whose last tau tokens stand elsewhere in the tree, off its own path, is redundant: it is not expanded but merged with
that place, so the tree becomes a graph. For verification the graph is a tree again: what follows that place is copied below
the node. A copy is no draw of the model's at that place, so every rule takes it as a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drafters.draft_tree import DraftTreeDrafter
from drafters.interface import DraftTree
from drafters.model.language_model import LanguageModel
from drafters.options import DraftGraphOptions


class DraftGraphDrafter(DraftTreeDrafter):
    """GSD for one session. Implements `Drafter`."""

    def __init__(self, model: LanguageModel, options: DraftGraphOptions) -> None:
        super().__init__(model, options)
        self._tau = options.tau
        self._places: dict[tuple[int, ...], int] = {}  # the first node that each tau-gram ends at
        self._edges: dict[int, int] = {}  # from redundant nodes to the places that they are merged with

    def propose(self, budget: int) -> DraftTree:
        self._places, self._edges = {}, {}
        return super().propose(budget)

    def _expandable(self, level: Sequence[int]) -> list[int]:
        for node in level:
            place = self._places.setdefault(self._ending(node), node)
            if place != node and place not in self._path(node):
                self._edges[node] = place
        return [node for node in super()._expandable(level) if node not in self._edges]

    def _tree(self, budget: int) -> DraftTree:
        self._unmerge(budget)
        return super()._tree(budget)

    def _unmerge(self, budget: int) -> None:
        """Copies what follows the merged places below the redundant nodes, the likeliest first, as far as there is room."""
        children: dict[int, list[int]] = {}
        for number, each in enumerate(self._nodes):
            children.setdefault(each.parent, []).append(number)
        waiting = [(node, place) for node, place in self._edges.items() if self._nodes[node].expands]
        while waiting and len(self._nodes) < budget:
            waiting.sort(key=lambda pair: self._nodes[pair[0]].path)
            node, place = waiting.pop()
            if self._nodes[node].depth >= self._options.steps:
                continue
            for original in children.get(place, [])[: budget - len(self._nodes)]:
                copied, above = self._nodes[original], self._nodes[node]
                estimate = above.path * self._calibration.accepted(copied.rank, copied.share)
                self._nodes.append(
                    replace(copied, parent=node, depth=above.depth + 1, path=estimate, row=-1, q=None, merged=True)
                )
                waiting.append((len(self._nodes) - 1, self._edges.get(original, original)))

    def _ending(self, node: int) -> tuple[int, ...]:
        """The last tau tokens up to a node, committed ones included."""
        path = [self._nodes[each].token for each in self._path(node)[: self._tau]][::-1]
        before = self._text.tolist()[len(self._text) - (self._tau - len(path)) :] if len(path) < self._tau else []
        return (*before, *path)

    def _path(self, node: int) -> list[int]:
        """The node and those above it."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self._nodes[node].parent
        return found
