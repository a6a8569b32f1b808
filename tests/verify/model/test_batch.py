"""Batches of a forward: chains and draft trees, their positions and ancestors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.verify.model.batch import ForwardBatch
from tests.trees import trees


def test_a_chain_is_causal() -> None:
    batch = ForwardBatch.chain(torch.tensor([7, 8, 9]))
    assert len(batch) == 3
    assert batch.depths.tolist() == [0, 1, 2]
    assert batch.ancestors is None
    assert batch.ancestor_mask().tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert batch.positions(10).tolist() == [10, 11, 12]


@given(trees(nodes=12), st.integers(0, 50))
def test_a_tree_has_a_row_for_the_root_and_each_node(tree: DraftTree, length: int) -> None:
    batch = ForwardBatch.tree(5, tree)
    assert batch.tokens.tolist() == [5, *tree.tokens.tolist()]
    assert batch.tokens.dtype == batch.depths.dtype == np.int64
    assert batch.positions(length).tolist() == [length, *(tree.depths + length).tolist()]
    mask = batch.ancestor_mask()
    for row in range(len(tree)):
        ancestors = [int(batch.tokens[at]) for at in np.flatnonzero(mask[row + 1])]
        assert ancestors == [5, *tree.path(row)]


def test_a_tree_without_nodes_is_its_root() -> None:
    batch = ForwardBatch.tree(5, EMPTY)
    assert batch.tokens.tolist() == [5]
    assert batch.ancestors is None
    assert batch.ancestor_mask().tolist() == [[True]]


def test_known_rows_have_no_positions() -> None:
    batch = replace(ForwardBatch.chain(torch.arange(5)), known=3)
    assert batch.positions(10).tolist() == [13, 14]
