"""Both searches give well-formed, bounded and repeatable trees, with the nodes that brute force gives."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import MAX_NODES, DraftTree
from outrider.drafters.tables import base_table
from outrider.drafters.tables.dice import new_dice
from outrider.drafters.tables.learned_table import learn, new_rows, successors
from outrider.drafters.tables.nodes import Nodes, choose_likeliest, draft_tree, new_nodes, reset
from outrider.drafters.tables.search import Trigrams, best_first, monte_carlo, new_pool, new_visits
from tests.trees import check, trees

BASE = base_table.empty_base()


def search(text: list[int], budget: int, depth: int, order: int = 3) -> DraftTree:
    rows, pool = new_rows(1024, 6), new_pool(1 + 6 * MAX_NODES, 6)
    learn(BASE, rows, np.array(text, np.int32), len(text), order, 1.0, 16.0)
    ending = np.array([-1, *text], np.int32)[-3:]
    size = best_first(Trigrams(BASE, rows, order), pool, ending, depth, budget, 0.0, new_dice())
    return draft_tree(pool.nodes, size, budget)


def monte_carlo_search(text: list[int], budget: int, depth: int, order: int = 3, candidates: int = 24) -> DraftTree:
    rows, pool, visits = new_rows(1024, 6), new_pool(1 + 6 * 150, 6), new_visits(1 + 6 * 150)
    learn(BASE, rows, np.array(text, np.int32), len(text), order, 1.0, 16.0)
    ending, random = np.array([-1, *text], np.int32)[-3:], np.array([12345], np.uint64)
    constants = (depth, 150, candidates, 32.0, 8.0, random, new_dice())
    return draft_tree(pool.nodes, monte_carlo(Trigrams(BASE, rows, order), pool, visits, ending, *constants), budget)


texts = st.lists(st.integers(0, 9), min_size=2, max_size=200)


@pytest.mark.parametrize("search", [search, monte_carlo_search])
@given(text=texts, budget=st.integers(1, MAX_NODES), depth=st.integers(1, 6), order=st.integers(2, 4))
def test_trees_are_well_formed_bounded_and_repeatable(
    search: Callable[..., DraftTree], text: list[int], budget: int, depth: int, order: int
) -> None:
    tree = search(text, budget, depth, order)
    check(tree)
    assert len(tree) <= budget
    assert not len(tree) or tree.depths.max() <= depth
    again = search(text, budget, depth, order)
    assert tree.tokens.tolist() == again.tokens.tolist()
    assert tree.parents.tolist() == again.parents.tolist()


@given(text=texts, budget=st.integers(1, 40))
def test_best_first_takes_the_likeliest_nodes(text: list[int], budget: int) -> None:
    tree = search(text, budget, depth=3)
    everything = all_paths(text, depth=3)
    likeliest = sorted(everything.values(), reverse=True)[:budget]
    assert np.allclose(sorted(tree.probability, reverse=True), likeliest, rtol=1e-4)


def all_paths(text: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """Every path of up to `depth` tokens with its probability, by brute force over the same table."""
    rows = new_rows(1024, 6)
    learn(BASE, rows, np.array(text, np.int32), len(text), 3, 1.0, 16.0)
    found: dict[tuple[int, ...], float] = {}

    def grow(path: tuple[int, ...], probability: float) -> None:
        tokens, shares = np.zeros(6, np.int32), np.zeros(6, np.float32)
        before = (*text, *path)
        for i in range(successors(BASE, rows, -1, before[-2], before[-1], 3, tokens, shares)):
            longer = (*path, int(tokens[i]))
            found[longer] = probability * float(shares[i])
            if len(longer) < depth:
                grow(longer, found[longer])

    grow((), 1.0)
    return found


def test_monte_carlo_takes_whole_continuations_likeliest_first() -> None:
    """The text continues 1 with "2 7" three times and with "3 8" once."""
    text = [1, 2, 7, 0, 1, 2, 7, 0, 1, 3, 8, 0, 1, 2, 7, 0, 1]
    chosen = []
    for candidates in (1, 2):
        tree = monte_carlo_search(text, 64, 2, candidates=candidates)
        leaves = set(range(len(tree))) - set(tree.parents.tolist())
        chosen.append([tree.path(row) for row in sorted(leaves)])
    assert chosen == [[[2, 7]], [[2, 7], [3, 8]]]


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
