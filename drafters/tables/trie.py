"""A trie of draft nodes: continuations with a common prefix share its nodes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.tables.nodes import Nodes, new_nodes


@structure
class Trie(NamedTuple):
    """Nodes, a hash table of their children, and the number of continuations through each node."""

    nodes: Nodes  # [P]
    counts: NDArray[np.int32]  # [P]
    table: NDArray[np.int32]  # [H]; node number of a child
    stamps: NDArray[np.int64]  # [H]; generation of a table entry: it is empty unless equal to `stamp`
    stamp: NDArray[np.int64]  # [1]; current generation
    scratch: NDArray[np.float64]  # [3, P]; for the noise


def new_trie(size: int) -> Trie:
    """Room for `size` nodes, node 0 included."""
    table = 1 << (2 * size - 1).bit_length()
    return zeros(Trie, size, nodes=new_nodes(size), table=table, stamps=table, stamp=1, scratch=(3, size))


@native
def restart(trie: Trie) -> None:
    """Empties the trie."""


@native
def child(trie: Trie, size: int, node: int, token: int, source: int) -> tuple[int, int]:
    """Finds or creates the child of `node` with `token`; returns it and the trie's new size.

    The caller must ensure that there is room for one more node.
    """
