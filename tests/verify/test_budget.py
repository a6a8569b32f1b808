"""The budget takes the nodes that pay, stops where none do, and tries again."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.draft import MAX_NODES, DraftTree, Source, chain
from verify.budget import LONGEST_PAUSE, MeasuredBudget
from verify.cost import NODES, CostCurve


def curve(per_node: float, fixed: float = 1.0) -> CostCurve:
    return CostCurve((64,), (tuple(fixed + per_node * nodes for nodes in NODES),))


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


def asked(budget: MeasuredBudget, tree: DraftTree, accepted: int, steps: int) -> list[int]:
    """The nodes verified in each of `steps` steps."""
    seen = []
    for _ in range(steps):
        proposed = tree if budget.ask() else draft()
        pruned = budget.prune(proposed, 0)
        seen.append(len(pruned))
        budget.saw(pruned, min(accepted, len(pruned)), 0.0)
    return seen


def test_drafts_that_are_never_accepted_stop_within_a_few_steps_and_are_tried_again() -> None:
    seen = asked(MeasuredBudget(curve(0.1)), draft(0.8, 0.8, 0.8, 0.8), 0, 400)
    assert seen[0] == 4
    assert np.count_nonzero(seen[12:80]) <= 5
    tries = np.flatnonzero(seen[100:])
    assert 0 < len(tries) < 30
    assert np.diff(tries).max() <= LONGEST_PAUSE + 2


def test_drafts_that_are_always_accepted_go_on() -> None:
    assert asked(MeasuredBudget(curve(0.1)), draft(0.8, 0.8, 0.8, 0.8), 4, 50) == [4] * 50


def test_where_nodes_cost_a_step_each_nothing_is_drafted() -> None:
    assert sum(asked(MeasuredBudget(curve(1.5)), draft(0.9, 0.9), 2, 50)) == 0


def test_a_curve_is_read_between_its_points() -> None:
    found = CostCurve((100, 200), (tuple(1.0 + n for n in NODES), tuple(3.0 + n for n in NODES)))
    assert found.at(150)[:4].tolist() == pytest.approx([2.0, 3.0, 4.0, 5.0])
    assert found.at(10_000)[MAX_NODES] == pytest.approx(67.0)
    noisy = CostCurve((1,), ((2.0, 1.0, 3.0, 2.5, 4.0, 5.0, 6.0, 7.0),)).at(1)
    assert np.all(np.diff(noisy) >= 0)
