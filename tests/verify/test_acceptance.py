"""The walk accepts exactly the path of plain decoding."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.interface import EMPTY, DraftTree
from tests.trees import trees
from verify.acceptance import accepted_rows, walk


@given(trees(vocabulary=4, nodes=20), st.lists(st.integers(0, 3), min_size=21, max_size=21))
def test_walk_follows_the_targets_own_choices(tree: DraftTree, chosen: list[int]) -> None:
    rows, tokens = walk(tree, chosen)
    paths = {tuple(tree.path(row)): row for row in range(len(tree))}
    path: tuple[int, ...] = ()
    expected_rows = []
    token = chosen[0]
    while (*path, token) in paths:
        path = (*path, token)
        expected_rows.append(paths[path])
        token = chosen[paths[path] + 1]
    assert rows.tolist() == expected_rows
    assert tokens.tolist() == [*path, token]
    agreed = accepted_rows(torch.tensor(chosen[: len(tree) + 1]), tree)
    assert agreed[0]
    assert np.flatnonzero(agreed[1:]).tolist() == expected_rows


def test_without_a_draft_the_bonus_token_is_emitted() -> None:
    rows, tokens = walk(EMPTY, [7])
    assert rows.tolist() == []
    assert tokens.tolist() == [7]
    assert accepted_rows(torch.tensor([7]), EMPTY).tolist() == [True]
