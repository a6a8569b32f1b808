"""Draft nodes under construction: the searches mark nodes, and the marked nodes become a DraftTree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.drafters.kernel import kernel


class Nodes(NamedTuple):
    """Preallocated node arrays. Node 0 is the root, the last committed token; a parent precedes its children."""

    tokens: NDArray[np.int32]  # [P]
    parents: NDArray[np.int32]  # [P]
    depths: NDArray[np.int32]  # [P]
    path: NDArray[np.float32]  # [P]; probability of the path from the root, at most the parent's
    source: NDArray[np.uint8]  # [P]
    chosen: NDArray[np.bool_]  # [P]; part of the draft; the parent of a chosen node is chosen


def new_nodes(size: int) -> Nodes:
    """Room for `size` nodes, node 0 included."""
    return Nodes(
        tokens=np.zeros(size, np.int32),
        parents=np.zeros(size, np.int32),
        depths=np.zeros(size, np.int32),
        path=np.zeros(size, np.float32),
        source=np.zeros(size, np.uint8),
        chosen=np.zeros(size, np.bool_),
    )


@kernel
def reset(nodes: Nodes, last: int) -> None:
    """Makes node 0 the token `last`."""
    nodes.tokens[0] = last
    nodes.parents[0] = -1
    nodes.depths[0] = 0
    nodes.path[0] = 1.0
    nodes.chosen[0] = True


@kernel
def likeliest_unchosen(nodes: Nodes, size: int) -> int:
    """The likeliest of the first `size` nodes that is not chosen, or -1; on ties the first, so a parent precedes its child."""
    best, best_path = -1, -1.0
    for node in range(1, size):
        if not nodes.chosen[node] and nodes.path[node] > best_path:
            best, best_path = node, nodes.path[node]
    return best


@kernel
def choose_likeliest(nodes: Nodes, size: int, budget: int) -> None:
    """Marks the `budget` likeliest paths among the first `size` nodes and clears all other marks."""
    for node in range(1, size):
        nodes.chosen[node] = False
    for _ in range(budget):
        best = likeliest_unchosen(nodes, size)
        if best < 0:
            return
        nodes.chosen[best] = True


@kernel
def _trim(nodes: Nodes, size: int, budget: int) -> int:
    """Clears the unlikeliest marks until at most `budget` remain; returns their number."""
    count = 0
    for node in range(1, size):
        count += nodes.chosen[node]
    while count > budget:
        worst = -1
        for node in range(1, size):
            # "<=": on ties the later node goes, so a child goes before its parent.
            if nodes.chosen[node] and (worst < 0 or nodes.path[node] <= nodes.path[worst]):
                worst = node
        nodes.chosen[worst] = False
        count -= 1
    return count


@kernel
def _lay_out(nodes: Nodes, size: int, marked: NDArray[np.int32], rows: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
    """Orders the marked nodes depth-first, likeliest child first: node numbers into `rows`, parents' rows into `parents`."""
    count = 0
    for node in range(1, size):
        if nodes.chosen[node]:
            marked[count] = node
            count += 1
    at, row_of_at, row = 0, -1, 0
    while row < count:
        best = -1
        for i in range(count):
            node = marked[i]
            if node and nodes.parents[node] == at and (best < 0 or nodes.path[marked[best]] < nodes.path[node]):
                best = i
        if best < 0:  # all children of `at` are placed: back to its parent
            row_of_at = parents[row_of_at]
            at = rows[row_of_at] if row_of_at >= 0 else 0
            continue
        at = marked[best]
        marked[best] = 0
        rows[row], parents[row] = at, row_of_at
        row_of_at = row
        row += 1


def lay_out(nodes: Nodes, size: int, budget: int) -> tuple[DraftTree, NDArray[np.int32]]:
    """The marked nodes among the first `size` as a DraftTree of at most `budget` nodes, and each row's node, int32 [N]."""
    count = _trim(nodes, size, budget)
    marked, rows, parents = np.empty((3, count), np.int32)
    if not count:
        return EMPTY, rows
    _lay_out(nodes, size, marked, rows, parents)
    tree = DraftTree(
        tokens=nodes.tokens[rows],
        parents=parents,
        depths=nodes.depths[rows],
        probability=nodes.path[rows],
        source=nodes.source[rows],
    )
    return tree, rows


def draft_tree(nodes: Nodes, size: int, budget: int) -> DraftTree:
    """The marked nodes among the first `size` as a DraftTree of at most `budget` nodes."""
    return lay_out(nodes, size, budget)[0]
