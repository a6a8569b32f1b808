"""The budget takes the nodes that pay, stops where none do, and tries again."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.interface import MAX_NODES, DraftTree, Source, chain
from verify.budget import RARELY, MeasuredBudget, outcome
from verify.cost import NODES, CostCurve


def curve(per_node: float, fixed: float = 1.0) -> CostCurve:
    return CostCurve(NODES, (64,), (tuple(fixed + per_node * nodes for nodes in NODES),))


def draft(*probabilities: float) -> DraftTree:
    path = np.cumprod(np.array(probabilities, np.float32))
    return chain(np.arange(len(path), dtype=np.int32), path.astype(np.float32), Source.LOOKUP)


def test_the_nodes_with_the_most_tokens_per_second_are_kept() -> None:
    tree = draft(0.9, 0.9, 0.9, 0.5, 0.2, 0.1)
    for per_node in (0.0, 0.05, 0.2, 0.5):
        kept = len(MeasuredBudget(curve(per_node)).prune(tree, 0))
        rates = [(1 + tree.probability[:n].sum()) / (1 + per_node * n) for n in range(len(tree) + 1)]
        assert kept == int(np.argmax(rates))


def test_a_branch_is_kept_only_with_its_parent() -> None:
    tokens, parents = np.array([1, 2, 3, 4], np.int32), np.array([-1, 0, 1, 0], np.int32)
    path = np.array([0.9, 0.6, 0.1, 0.3], np.float32)
    tree = DraftTree(tokens, parents, np.array([1, 2, 3, 2], np.int32), path, np.zeros(4, np.uint8))
    kept = MeasuredBudget(curve(0.15)).prune(tree, 0)
    kept.check()
    assert kept.tokens.tolist() == [1, 2, 4][: len(kept)]


def asked(budget: MeasuredBudget, tree: DraftTree, emitted: list[int], steps: int) -> list[int]:
    """The nodes verified in each of `steps` steps that emit the same."""
    seen = []
    for _ in range(steps):
        proposed = tree if budget.ask() else draft()
        pruned = budget.prune(proposed, 0)
        seen.append(len(pruned))
        budget.record(proposed, pruned, np.array(emitted[: len(pruned) + 1], np.int32), 0.0)
    return seen


def test_drafts_that_never_come_true_stop_within_a_few_steps_and_come_back_when_they_do() -> None:
    budget, tree = MeasuredBudget(curve(0.1)), draft(0.8, 0.8, 0.8, 0.8)
    seen = asked(budget, tree, [9], 100)
    assert seen[0] == 4
    assert sum(seen[12:]) == 0
    back = asked(budget, tree, [0, 1, 2, 3, 4], 60)
    assert back[-1] == 4


def test_drafts_that_always_come_true_go_on() -> None:
    assert asked(MeasuredBudget(curve(0.1)), draft(0.8, 0.8, 0.8, 0.8), [0, 1, 2, 3, 4], 50) == [4] * 50


def test_where_nodes_cost_a_step_each_nothing_is_drafted_and_the_drafter_is_asked_rarely() -> None:
    budget = MeasuredBudget(curve(1.5))
    assert sum(asked(budget, draft(0.9, 0.9), [0, 1, 2], 50)) == 0
    assert sum(budget.ask() > 0 for _ in range(40)) == 40 // RARELY


def test_who_fills_the_budget_is_asked_for_as_many_nodes_as_were_worth_it() -> None:
    budget = MeasuredBudget(curve(0.1))
    assert budget.ask() == MAX_NODES
    assert len(budget.prune(draft(*[0.9] * 4, 0.05, *[0.5] * (MAX_NODES - 5)), 0)) == 4
    assert budget.ask() == 4
    assert len(budget.prune(draft(0.9, 0.9, 0.6, 0.55), 0)) == 4  # the last one brings 0.27 tokens, barely enough
    assert budget.ask() == 4
    assert len(budget.prune(draft(0.9, 0.9, 0.9, 0.9), 0)) == 4  # 0.66 are plenty
    assert budget.ask() == MAX_NODES


def test_who_drafts_less_than_asked_is_not_asked_for_less() -> None:
    budget = MeasuredBudget(curve(0.1))
    assert len(budget.prune(draft(0.9, 0.9, 0.9, 0.9, 0.05, 0.5), 0)) == 4
    assert budget.ask() == MAX_NODES


def test_the_outcome_counts_along_the_emitted_path() -> None:
    tokens, parents = np.array([1, 2, 3, 4], np.int32), np.array([-1, 0, 1, 0], np.int32)
    path = np.array([0.8, 0.4, 0.1, 0.2], np.float32)
    tree = DraftTree(tokens, parents, np.array([1, 2, 3, 2], np.int32), path, np.zeros(4, np.uint8))
    assert outcome(tree, np.array([7], np.int32)) == pytest.approx((0.8, 0))
    assert outcome(tree, np.array([1, 4, 9], np.int32)) == pytest.approx((0.8 + 0.6 / 0.8, 2))
    assert outcome(tree, np.array([1, 2, 9], np.int32)) == pytest.approx((0.8 + 0.6 / 0.8 + 0.25, 2))


def test_a_curve_is_read_between_its_points() -> None:
    found = CostCurve(NODES, (100, 200), (tuple(1.0 + n for n in NODES), tuple(3.0 + n for n in NODES)))
    assert found.at(150)[:4].tolist() == pytest.approx([2.0, 3.0, 4.0, 5.0])
    assert found.at(10_000)[MAX_NODES] == pytest.approx(67.0)
    noisy = CostCurve(NODES, (1,), ((2.0, 1.0, 3.0, 2.5, 4.0, 5.0, 6.0, 7.0),)).at(1)
    assert np.all(np.diff(noisy) >= 0)
