"""Draft trees: of given nodes, and random ones for property tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from outrider.drafters.interface import MAX_NODES, DraftTree, Source


def tree_of(tokens: Sequence[int], parents: Sequence[int], probability: Sequence[float] = (), source: Any = 0) -> DraftTree:
    """A tree of nodes in this order."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    ids, above, levels = (np.array(values, np.int32) for values in (tokens, parents, depths))
    path = np.array(probability or [1.0] * len(ids), np.float32)
    return DraftTree(ids, above, levels, path, np.full(len(ids), source, np.uint8))


@st.composite
def trees(draw: st.DrawFn, vocabulary: int = 97, nodes: int = 24) -> DraftTree:
    """A tree of up to `nodes` nodes, depth-first, siblings distinct."""
    size = draw(st.integers(0, nodes))
    tokens: list[int] = []
    parents: list[int] = []
    probability: list[float] = []
    used: set[tuple[int, int]] = set()
    for row in range(size):
        # Depth-first: the parent of the next node is the last node or one of its ancestors.
        line = [row - 1]
        while line[-1] >= 0:
            line.append(parents[line[-1]])
        free = {p: [token for token in range(vocabulary) if (p, token) not in used] for p in line}
        parent = draw(st.sampled_from([p for p in line if free[p]]))
        token = draw(st.sampled_from(free[parent]))
        used.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        probability.append((1.0 if parent < 0 else probability[parent]) * draw(st.floats(0.1, 1.0)))
    return tree_of(tokens, parents, probability, Source.TRIGRAM)


def check(tree: DraftTree) -> None:
    """Asserts a DraftTree's invariants: sizes, depth-first rows, non-increasing probabilities, distinct siblings."""
    size = len(tree)
    assert all(len(a) == size for a in (tree.parents, tree.depths, tree.probability, tree.source))
    assert size <= MAX_NODES
    siblings: set[tuple[int, int]] = set()
    for row in range(size):
        parent = int(tree.parents[row])
        assert -1 <= parent < row
        above_depth, above_probability = (0, 1.0) if parent < 0 else (tree.depths[parent], tree.probability[parent])
        assert tree.depths[row] == above_depth + 1
        assert 0.0 <= tree.probability[row] <= above_probability + 1e-5
        before = row - 1  # depth-first: the parent is the row before, or an ancestor of it
        while before != parent:
            assert before >= 0
            before = int(tree.parents[before])
        siblings.add((parent, int(tree.tokens[row])))
    assert len(siblings) == size
