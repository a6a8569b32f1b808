"""A draft model's chains and trees: expansion, leaves, budgets and sampled trees."""

import numpy as np

from outrider.drafters.interface import DraftTree, Source, Verdict
from outrider.drafters.model.draft_tree import DraftTreeDrafter
from outrider.drafters.model.pair import Pair
from outrider.drafters.options import DraftTreeOptions
from tests.drafts import Driven
from tests.language import ToyModel
from tests.trees import check

# Next tokens: 0 -> 1 and 2 -> 0 almost certainly, 1 -> 2 or 3, 3 -> any.
TABLE = np.array([[0.01, 0.97, 0.01, 0.01], [0.01, 0.01, 0.6, 0.38], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]])
PROMPT = np.array([3, 0], np.int32)


def emitted(tree: DraftTree, *tokens: int) -> Verdict:
    return Verdict(tree, np.empty(0, np.int32), np.array(tokens, np.int32))


def test_a_chain_is_the_models_greedy_path_until_a_token_is_unlikely() -> None:
    model = ToyModel(TABLE)
    drafter = Driven(DraftTreeDrafter(model, DraftTreeOptions(1, 10, 0.7, 0.0, only_if_worth=False), Pair()))
    drafter.begin(PROMPT)
    tree = drafter.propose(64)
    check(tree)
    assert tree.tokens.tolist() == [1, 2]  # an unlikely token is not expanded
    assert set(tree.source.tolist()) == {int(Source.DRAFT)}
    assert len(model.forwards) == 2
    drafter.observe(emitted(tree, 1, 2, 0))
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
