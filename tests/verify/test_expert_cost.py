"""Nodes of a mixture cost by the experts that they touch: what rows touch is learned, and decides how many are verified."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.drafters.interface import DraftTree, Source, chain
from outrider.verify.budget import Budget, Draft, divide_nodes
from outrider.verify.cost import CostCurve, parse
from outrider.verify.expert_cost import ExpertCost, Kind, Touched, kinds_of_step
from outrider.verify.measurement import NODES

COUNT, USED = 32, 4
FIXED, PER_ROW, PER_EXPERT = 0.010, 0.0002, 0.0015
# How much of the experts of a random token a row of each kind touches newly.
TRUTH = {Kind.NEXT: 0.8, Kind.SIBLING: 0.5, Kind.COPY: 0.1, Kind.ROOT: 1.0}


def draft(source: Source, depth: int = 8, chance: float = 0.9) -> DraftTree:
    return chain(np.arange(depth, dtype=np.int32), (chance ** np.arange(1, depth + 1)).astype(np.float32), source)


def any_kinds(random: np.random.Generator) -> np.ndarray:
    return random.choice(len(Kind), int(random.integers(1, 12)), p=random.dirichlet(np.ones(len(Kind))))


def touched(kinds: np.ndarray, random: np.random.Generator) -> float:
    """The mean over 24 mixtures of a machine."""
    new = np.zeros(24)
    for kind in kinds:
        new += random.binomial(USED, TRUTH[Kind(kind)] * (1 - new / (COUNT - USED)))
        new = np.minimum(new, COUNT - USED)
    return USED + float(new.mean())


def seconds(rows: int, experts: float) -> float:
    return FIXED + PER_ROW * rows + PER_EXPERT * (experts - USED)


def start() -> CostCurve:
    """As of a server that has just started, on a machine that was busy: all is 1.3 times, an expert twice what it costs."""
    points = [[1.3 * seconds(1 + nodes, USED) for nodes in NODES]]
    return CostCurve(NODES, (64,), points, 1.3 * PER_ROW, experts=ExpertCost(COUNT, USED, 2 * PER_EXPERT))


@pytest.fixture(scope="module")
def learned() -> CostCurve:
    """The curve after a minute of steps."""
    curve, random = start(), np.random.default_rng(0)
    for _ in range(2000):
        kinds = any_kinds(random)
        experts = touched(kinds, random)
        curve.observe(64, 1, len(kinds) + 1, seconds(len(kinds) + 1, experts), Touched(kinds, experts))
    return curve


def test_steps_teach_what_rows_touch_and_what_experts_cost(learned: CostCurve) -> None:
    random, errors = np.random.default_rng(1), []
    for _ in range(50):
        kinds = any_kinds(random)
        experts = np.mean([touched(kinds, random) for _ in range(20)])
        errors.append(learned.of_step(64, 1, len(kinds) + 1, kinds) / seconds(len(kinds) + 1, float(experts)) - 1)
    assert np.abs(errors).max() < 0.15
    copies, others = (np.full(8, kind) for kind in (Kind.COPY, Kind.NEXT))
    assert learned.of_step(64, 1, 9, others) > 1.5 * learned.of_step(64, 1, 9, copies)


def test_nodes_that_touch_few_experts_are_verified_where_others_are_not(learned: CostCurve) -> None:
    counts = [
        len(divide_nodes([Draft(draft(source, chance=0.5))], [Budget(curve=learned)])[0].tree)
        for source in (Source.LOOKUP, Source.TRIGRAM)
    ]
    assert counts[0] >= counts[1] + 2


def test_rows_are_told_apart_by_parents_sources_and_streams() -> None:
    tree = DraftTree(
        tokens=np.arange(5, dtype=np.int32),
        parents=np.array([-1, 0, 0, -1, 3], np.int32),
        depths=np.array([1, 2, 2, 1, 2], np.int32),
        probability=np.ones(5, np.float32),
        source=np.array([Source.TRIGRAM] * 4 + [Source.RETRIEVAL], np.uint8),
    )
    expected = [Kind.NEXT, Kind.NEXT, Kind.SIBLING, Kind.SIBLING, Kind.COPY]
    assert kinds_of_step([tree]).tolist() == expected
    assert kinds_of_step([tree, tree]).tolist() == [*expected, Kind.ROOT, *expected]
    assert not len(kinds_of_step([]))


def test_more_rows_touch_more_experts_up_to_all_and_what_was_saved_is_the_same(learned: CostCurve) -> None:
    assert learned.experts is not None
    found = learned.experts.touched(np.array([Kind.COPY, Kind.ROOT]), 400)
    assert found[0] == USED and (np.diff(found) >= 0).all() and COUNT - 0.01 < found[-1] <= COUNT
    restored = parse(json.dumps(learned.state()), NODES[-1])
    assert restored.of_rows(64, 2, 50).tolist() == pytest.approx(learned.of_rows(64, 2, 50).tolist())


@pytest.mark.parametrize(
    "changes", [{"left": [0.0, 1, 1, 1]}, {"left": [1.0]}, {"used": COUNT}, {"seconds": -1.0}, {"count": None}], ids=str
)
def test_experts_of_a_file_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    state = start().state()
    with pytest.raises(ValueError, match=r"experts|Error"):
        parse(json.dumps(state | {"experts": state["experts"] | changes}), NODES[-1])
