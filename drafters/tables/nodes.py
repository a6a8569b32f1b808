"""Draft nodes under construction: the searches mark nodes, and the marked nodes become a DraftTree."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.drafters.native.library import native, structure, zeros


@structure
class Nodes(NamedTuple):
    """Preallocated node arrays. Node 0 is the root, the last committed token; a parent precedes its children."""

    tokens: NDArray[np.int32]  # [P]
    parents: NDArray[np.int32]  # [P]
    depths: NDArray[np.int32]  # [P]
    path: NDArray[np.float32]  # [P]; probability of the path from the root, at most the parent's
    source: NDArray[np.uint8]  # [P]
    chosen: NDArray[np.bool_]  # [P]; part of the draft; the parent of a chosen node is chosen
    rows: NDArray[np.int32]  # [P]; nodes in the order of the draft, or of a search
    row_parents: NDArray[np.int32]  # [P]; the number of the parent's row in the draft, -1 = the root


def new_nodes(size: int) -> Nodes:
    """Room for `size` nodes, node 0 included."""
    return zeros(Nodes, size)


@native
def choose_likeliest(nodes: Nodes, size: int, budget: int) -> None:
    """Marks the `budget` likeliest paths among the first `size` nodes and clears all other marks."""


@native
def _lay_out(nodes: Nodes, size: int, budget: int) -> int:
    """Clears the unlikeliest marks among the first `size` nodes until at most `budget` remain; returns their number.

    Sets `rows` and `row_parents` of the marked nodes, depth-first, likeliest child first.
    """


def draft_tree(nodes: Nodes, size: int, budget: int) -> DraftTree:
    """The marked nodes among the first `size` as a DraftTree of at most `budget` nodes."""
    count = _lay_out(nodes, size, budget)
    if not count:
        return EMPTY
    rows = nodes.rows[:count]
    return DraftTree(
        tokens=nodes.tokens[rows],
        parents=nodes.row_parents[:count].copy(),
        depths=nodes.depths[rows],
        probability=nodes.path[rows],
        source=nodes.source[rows],
    )
