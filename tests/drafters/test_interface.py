"""DraftTree: invariants, ancestors, paths and cuts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree, Source, Verdict, arrange, chain
from tests.trees import check, trees


@given(trees(), st.integers(0, 6))
def test_limit_keeps_exactly_the_shallow_nodes(tree: DraftTree, depth: int) -> None:
    limited = tree.limit(depth)
    check(limited)
    assert [limited.path(row) for row in range(len(limited))] == [
        tree.path(row) for row in range(len(tree)) if tree.depths[row] <= depth
    ]


@given(trees())
def test_ancestors_are_the_path_to_the_root(tree: DraftTree) -> None:
    mask = tree.ancestors
    assert mask[0].tolist() == [True] + [False] * len(tree)
    for row in range(len(tree)):
        expected = {0, row + 1}
        parent = int(tree.parents[row])
        while parent >= 0:
            expected.add(parent + 1)
            parent = int(tree.parents[parent])
        assert set(np.flatnonzero(mask[row + 1])) == expected


@given(trees(vocabulary=4), st.lists(st.integers(0, 3), max_size=6))
def test_a_tree_is_followed_as_far_as_it_has_the_tokens(tree: DraftTree, tokens: list[int]) -> None:
    rows = tree.follow(np.array(tokens, np.int32)).tolist()
    assert all(tree.path(row) == tokens[: depth + 1] for depth, row in enumerate(rows))
    paths = {tuple(tree.path(row)) for row in range(len(tree))}
    assert len(rows) == len(tokens) or tuple(tokens[: len(rows) + 1]) not in paths


def test_arranged_nodes_are_depth_first_with_siblings_in_order() -> None:
    tree, order = arrange(
        tokens=[1, 2, 3, 4, 5], parents=[-1, -1, 0, 1, 0], probability=[0.9, 0.8, 0.5, 0.4, 0.3], source=[0] * 5
    )
    check(tree)
    assert order == [0, 2, 4, 1, 3]
    assert tree.tokens.tolist() == [1, 3, 5, 2, 4]
    assert tree.depths.tolist() == [1, 2, 2, 1, 2]


def test_a_cut_verdict_keeps_the_first_tokens() -> None:
    tree = chain(np.array([5, 6], np.int32), np.array([0.9, 0.5], np.float32), Source.LOOKUP)
    verdict = Verdict(tree, np.array([0, 1], np.int32), np.array([5, 6, 9], np.int32))
    assert verdict.cut(3) is verdict
    assert verdict.cut(1).tokens.tolist() == [5]
    assert verdict.cut(1).path.tolist() == [0]
