"""Draft nodes by path: several continuations that begin alike share their nodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafters.tables.kernel import kernel
from drafters.tables.nodes import Nodes, new_nodes, reset


class Trie(NamedTuple):
    """Nodes with a hash table of children and the number of continuations that pass through each."""

    nodes: Nodes  # [P]
    counts: NDArray[np.int32]  # [P]
    table: NDArray[np.int32]  # [H]; a child's number
    stamps: NDArray[np.int64]  # [H]; the proposal that a table entry belongs to
    stamp: NDArray[np.int64]  # [1]


def new_trie(size: int) -> Trie:
    """Room for `size` nodes."""
    table = 1 << (2 * size - 1).bit_length()
    return Trie(
        new_nodes(size),
        np.zeros(size, np.int32),
        np.zeros(table, np.int32),
        np.zeros(table, np.int64),
        np.zeros(1, np.int64),
    )


@kernel
def restart(trie: Trie) -> None:
    """Empties the trie."""
    reset(trie.nodes, 0)
    trie.counts[0] = 0
    trie.stamp[0] += 1  # older table entries count as empty


@kernel
def child(trie: Trie, size: int, node: int, token: int, source: int) -> tuple[int, int]:
    """The child of `node` with `token`, made where there is none; returns it and the trie's size.

    The caller sees to it that there is room for one more.
    """
    nodes = trie.nodes
    mask = len(trie.table) - 1
    slot = np.int64((node * 0x9E3779B1 + token * 0x85EBCA77) & mask)
    while trie.stamps[slot] == trie.stamp[0]:
        child = trie.table[slot]
        if nodes.parents[child] == node and nodes.tokens[child] == token:
            return child, size
        slot = (slot + 1) & mask
    trie.stamps[slot] = trie.stamp[0]
    trie.table[slot] = size
    nodes.tokens[size] = token
    nodes.parents[size] = node
    nodes.depths[size] = nodes.depths[node] + 1
    nodes.source[size] = source
    trie.counts[size] = 0
    return size, size + 1
