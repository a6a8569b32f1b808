"""The likeliest nodes are marked, and marked nodes become a well-formed tree, depth-first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree
from outrider.drafters.tables.nodes import Nodes, choose_likeliest, draft_tree, new_nodes, reset
from tests.trees import check, trees


def shuffled(tree: DraftTree, seed: int) -> Nodes:
    """The tree's nodes in a random order with parents before children."""
    size = len(tree)
    nodes = new_nodes(size + 1)
    reset(nodes, 0)
    keys = np.random.default_rng(seed).random(size) + tree.depths
    order = np.argsort(keys)
    place = np.empty(size, np.int64)
    place[order] = np.arange(1, size + 1)
    nodes.tokens[1:] = tree.tokens[order]
    nodes.parents[1:] = [0 if p < 0 else place[p] for p in tree.parents[order]]
    nodes.depths[1:] = tree.depths[order]
    nodes.path[1:] = tree.probability[order]
    nodes.source[1:] = tree.source[order]
    return nodes


@given(trees(), st.integers(0, 5), st.integers(1, 30))
def test_the_likeliest_nodes_make_the_tree(tree: DraftTree, seed: int, budget: int) -> None:
    nodes = shuffled(tree, seed)
    choose_likeliest(nodes, len(tree) + 1, budget)
    draft = draft_tree(nodes, len(tree) + 1, budget)
    check(draft)
    assert len(draft) == min(budget, len(tree))
    assert sorted(draft.probability)[::-1] == sorted(tree.probability)[::-1][: len(draft)]
    for parent in range(-1, len(draft)):
        siblings = draft.probability[draft.parents == parent]
        assert np.all(np.diff(siblings) <= 0)
