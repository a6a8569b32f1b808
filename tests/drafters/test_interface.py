"""DraftTree: invariants, ancestors, paths and cuts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree, arrange
from tests.trees import check, trees


@given(trees(), st.integers(0, 6))
def test_limit_keeps_exactly_the_shallow_nodes(tree: DraftTree, depth: int) -> None:
    limited = tree.limit(depth)
    check(limited)
    assert [limited.path(row) for row in range(len(limited))] == [
        tree.path(row) for row in range(len(tree)) if tree.depths[row] <= depth
    ]


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
