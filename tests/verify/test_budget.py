"""Budgets select the nodes that pay, stop drafting that does not, and probe again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree, Draws, Source, chain
from outrider.verify.budget import LONGEST_INTERVAL, Budget, Choice, Draft, divide_nodes
from outrider.verify.cost import CostCurve
from outrider.verify.measurement import NODES


def curve(per_node: float, fixed: float = 1.0) -> CostCurve:
    return CostCurve(NODES, (64,), (tuple(fixed + per_node * nodes for nodes in NODES),))


def draft(*probabilities: float) -> DraftTree:
    path = np.cumprod(np.array(probabilities, np.float32))
    return chain(np.arange(len(path), dtype=np.int32), path.astype(np.float32), Source.LOOKUP)


def select(budget: Budget, tree: DraftTree) -> Choice:
    """The choice for a stream alone."""
    return divide_nodes([Draft(tree)], [budget])[0]


def test_the_nodes_with_the_most_tokens_per_second_are_kept() -> None:
    tree = draft(0.9, 0.9, 0.9, 0.5, 0.2, 0.1)
    for per_node in (0.0, 0.05, 0.2, 0.5):
        kept = len(select(Budget(curve=curve(per_node)), tree).tree)
        rates = [(1 + tree.probability[:n].sum()) / (1 + per_node * n) for n in range(len(tree) + 1)]
        assert kept == int(np.argmax(rates))


def test_sampled_nodes_are_always_kept() -> None:
    tokens, path = np.array([1, 2, 3], np.int32), np.array([0.9, 0.1, 0.5], np.float32)
    q = np.full(4, 0.25, np.float32)
    draws = {-1: Draws(q, (0,)), 0: Draws(q, (1,))}
    tree = DraftTree(tokens, np.array([-1, 0, -1], np.int32), np.array([1, 2, 1], np.int32), path, np.zeros(3, np.uint8), draws)
    assert select(Budget(curve=curve(0.0)), tree).tree is tree
    kept = select(Budget(curve=curve(0.9)), tree).tree
    assert kept.tokens.tolist() == [1, 2]
    assert kept.draws.keys() == {-1, 0}


def verified(budget: Budget, tree: DraftTree, emitted: list[int], steps: int) -> list[int]:
    """The nodes verified in each of `steps` steps with the same outcome."""
    sizes = []
    for _ in range(steps):
        proposed = tree if budget.nodes() else draft()
        choice = select(budget, proposed)
        sizes.append(len(choice.tree))
        budget.record(proposed, choice, np.array(emitted[: len(choice.tree) + 1], np.int32), 0.0)
    return sizes


def test_rejected_drafts_stop_within_a_few_steps_and_resume_when_accepted() -> None:
    budget, tree = Budget(curve=curve(0.1)), draft(0.8, 0.8, 0.8, 0.8)
    counts = verified(budget, tree, [9], 100)
    assert counts[0] == 4
    assert sum(counts[24:]) == 0
    resumed = verified(budget, tree, [0, 1, 2, 3, 4], 60)
    assert resumed[-1] == 4


def test_nodes_that_cost_a_step_each_are_only_probed() -> None:
    budget = Budget(curve=curve(1.5))
    assert sum(verified(budget, draft(0.9, 0.9), [0, 1, 2], 50)) == 0
    assert sum(budget.nodes() > 0 for _ in range(40)) == 40 // LONGEST_INTERVAL


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8), st.floats(0.02, 1.5))
def test_nodes_below_the_least_probability_are_never_verified(probabilities: list[float], slope: float) -> None:
    budget = Budget(curve=curve(slope))
    choice = select(budget, draft(*probabilities))
    assert (choice.tree.probability >= budget.least(0)).all()


def test_streams_share_the_nodes_that_a_round_can_afford() -> None:
    """Nodes cost the same in all streams, so those that promise most are verified, whoever drafted them."""
    likely, unlikely = draft(0.9, 0.9, 0.9), draft(0.35, 0.9)
    costs = curve(0.3)

    def sizes(*streams: tuple[Draft, Budget]) -> list[int]:
        drafts, budgets = zip(*streams, strict=True)
        return [len(choice.tree) for choice in divide_nodes(drafts, budgets)]

    first, second = (Draft(likely), Budget(curve=costs)), (Draft(unlikely), Budget(curve=costs))
    assert sizes(second) == [2]
    assert sizes(first, second) == [3, 0]
    assert sizes(second, first) == [0, 3]
    assert sizes(first, (Draft(unlikely), Budget(5))) == [3, 2]  # a fixed number is kept
    assert sizes(first, (Draft(unlikely, prunable=False), Budget(curve=costs))) == [3, 2]
    distrusted = Budget(curve=costs)
    for _ in range(40):
        distrusted.nodes()
        distrusted.record(likely, Choice(likely, len(likely)), np.array([9], np.int32), 0.0)
    assert sizes((Draft(likely), distrusted), first) == [0, 3]
