"""DraftTree keeps its invariants under every cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafters.interface import EMPTY, DraftTree, Source, Verdict, chain
from tests.trees import trees


@given(trees())
def test_random_trees_are_well_formed(tree: DraftTree) -> None:
    tree.check()
    assert all(tree.path(row)[-1] == tree.tokens[row] for row in range(len(tree)))


@given(trees(), st.integers(0, 6))
def test_limit_keeps_exactly_the_shallow_nodes(tree: DraftTree, depth: int) -> None:
    limited = tree.limit(depth)
    limited.check()
    assert [limited.path(row) for row in range(len(limited))] == [
        tree.path(row) for row in range(len(tree)) if tree.depths[row] <= depth
    ]


@given(trees())
def test_ancestors_are_the_path_to_the_root(tree: DraftTree) -> None:
    seen = tree.ancestors
    assert seen[0].tolist() == [True] + [False] * len(tree)
    for row in range(len(tree)):
        expected = {0, row + 1}
        parent = int(tree.parents[row])
        while parent >= 0:
            expected.add(parent + 1)
            parent = int(tree.parents[parent])
        assert set(np.flatnonzero(seen[row + 1])) == expected


def test_chain_is_a_tree_without_branches() -> None:
    tree = chain(np.array([5, 6, 7], np.int32), np.array([0.9, 0.5, 0.1], np.float32), Source.LOOKUP)
    tree.check()
    assert tree.path(2) == [5, 6, 7]
    assert len(EMPTY) == 0


def test_a_cut_verdict_forgets_what_came_after() -> None:
    tree = chain(np.array([5, 6], np.int32), np.array([0.9, 0.5], np.float32), Source.LOOKUP)
    verdict = Verdict(tree, np.array([0, 1], np.int32), np.array([5, 6, 9], np.int32))
    assert verdict.cut(3) is verdict
    assert verdict.cut(1).tokens.tolist() == [5]
    assert verdict.cut(1).rows.tolist() == [0]
