"""A draft model's chains, trees and graphs: expansion, leaves, budgets, sampled trees, and continuations drafted once (GSD)."""

import numpy as np

from outrider.drafters.interface import DraftTree, Source, Verdict
from outrider.drafters.model.draft_tree import DraftGraphDrafter, DraftTreeDrafter
from outrider.drafters.model.pair import Pair
from outrider.drafters.options import DraftGraphOptions, DraftTreeOptions
from tests.drafts import Driven
from tests.language import ToyModel
from tests.trees import check

# Next tokens: 0 -> 1 and 2 -> 0 almost certainly, 1 -> 2 or 3, 3 -> any.
TABLE = np.array([[0.01, 0.97, 0.01, 0.01], [0.01, 0.01, 0.6, 0.38], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]])
PROMPT = np.array([3, 0], np.int32)


def test_a_chain_is_the_models_greedy_path_until_a_token_is_unlikely() -> None:
    model = ToyModel(TABLE)
    drafter = Driven(DraftTreeDrafter(model, DraftTreeOptions(1, 10, 0.7, 0.0, only_if_worth=False), Pair()))
    drafter.begin(PROMPT)
    tree = drafter.propose(64)
    check(tree)
    assert tree.tokens.tolist() == [1, 2]  # an unlikely token is not expanded
    assert set(tree.source.tolist()) == {int(Source.DRAFT)}
    assert len(model.forwards) == 2
    drafter.observe(Verdict(tree, np.empty(0, np.int32), np.array([1, 2, 0], np.int32)))
    assert drafter.propose(64).tokens.tolist() == [1, 2]


def test_unlikely_nodes_and_poor_siblings_are_leaves() -> None:
    drafter = Driven(DraftTreeDrafter(ToyModel(TABLE), DraftTreeOptions(2, 3, 0.3, 0.7, only_if_worth=False), Pair()))
    drafter.begin(PROMPT)
    tree = drafter.propose(64)
    check(tree)
    likely, poor = [row for row in range(len(tree)) if tree.depths[row] == 2 and tree.tokens[tree.parents[row]] == 1]
    assert (tree.tokens[likely], tree.tokens[poor]) == (2, 3)
    assert (tree.parents == likely).sum() == 2
    assert not (tree.parents == poor).any()  # 0.38 exceeds theta_prob, but not theta_sib * 0.6


def test_a_sampled_tree_carries_its_proposal_distributions() -> None:
    drafter = Driven(
        DraftTreeDrafter(ToyModel(TABLE, np.random.default_rng(0)), DraftTreeOptions(2, 3, 0, 0, only_if_worth=False), Pair())
    )
    drafter.begin(PROMPT)
    tree = drafter.propose(64)
    assert tree.draws.keys() == set(tree.parents.tolist())
    for row, draws in tree.draws.items():
        assert np.allclose(draws.q, TABLE[tree.tokens[row] if row >= 0 else 0])
        assert set(draws.rows) == set(np.flatnonzero(tree.parents == row).tolist())
    assert tree.drawn.all()
    cut = tree.limit(2)
    assert cut.draws.keys() == set(cut.parents.tolist())


# 0 -> 1 or 2; both -> 3 -> 4 -> 5 -> 6 -> 0.
RECURRING = np.full((7, 7), 0.01)
for token, *follow in ((0, 1, 2), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (6, 0)):
    RECURRING[token, follow] = 0.5
RECURRING /= RECURRING.sum(1, keepdims=True)
PLAIN = DraftTreeOptions(2, 6, 0.3, 0.3, only_if_worth=False)
MERGED = DraftGraphOptions(2, 6, 0.3, 0.3, only_if_worth=False, tau=2)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path(row)) for row in range(len(tree))}


def test_recurring_continuations_are_drafted_once_and_verified_everywhere() -> None:
    plain, merging = ToyModel(RECURRING), ToyModel(RECURRING)
    tree_drafter, graph_drafter = (
        Driven(DraftTreeDrafter(plain, PLAIN, Pair())),
        Driven(DraftGraphDrafter(merging, MERGED, Pair())),
    )
    for drafter in (tree_drafter, graph_drafter):
        drafter.begin(PROMPT)
    tree, graph = tree_drafter.propose(64), graph_drafter.propose(64)
    check(graph)
    both = {(1, 3, 4, 5, 6), (2, 3, 4, 5, 6)}
    assert both <= paths(tree)
    assert both <= paths(graph)
    # (3, 4) below 2 merges with (3, 4) below 1, so later forwards have one row.
    assert sum(merging.forwards) < sum(plain.forwards)
    copied = graph.source == Source.MERGED
    assert 0 < copied.sum() < len(graph)
    assert (~copied).sum() < len(tree)


def test_copies_are_not_samples() -> None:
    drafter = Driven(
        DraftGraphDrafter(
            ToyModel(RECURRING, np.random.default_rng(1)), DraftGraphOptions(2, 6, 0, 0, only_if_worth=False), Pair()
        )
    )
    drafter.begin(PROMPT)
    tree = drafter.propose(64)
    check(tree)
    assert tree.draws
    assert (tree.drawn == (tree.source != Source.MERGED)).all()
    assert (tree.source == Source.MERGED).any()
