"""The cost curve ascends whatever it is told, heals by what steps take, and is read from a file only if it is complete."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import MAX_NODES
from outrider.verify.cost import CostCurve, parse
from outrider.verify.measurement import NODES

CURVE = CostCurve((0, 1, MAX_NODES), (64, 512), ((0.1, 0.2, 0.3), (0.2, 0.3, 0.4)), 0.01, 0.02)
CONTEXTS = (64, 512, 2048)


def true_seconds(context: float, rows: float) -> float:
    """A machine: a fixed part, a part that grows with the rows, and one that grows with the context."""
    return 0.010 + 0.0005 * rows + 1e-6 * context


def true_curve(factor: float = 1.0) -> CostCurve:
    seconds = [[factor * true_seconds(context, 1 + nodes) for nodes in NODES] for context in CONTEXTS]
    return CostCurve(NODES, CONTEXTS, seconds, 0.0005 * factor, 0.001)


def best_nodes(curve: CostCurve, context: int, chance: float) -> int:
    """The nodes that the curve chooses for a chain whose tokens are each accepted with `chance`."""
    tokens = 1 + np.concatenate([[0.0], np.cumsum(chance ** np.arange(1, MAX_NODES + 1))])
    return int(np.argmax(tokens / curve.at(context)))


def serve(curve: CostCurve, steps: int, noise: float = 0.0, factor: float = 1.0, seed: int = 0) -> None:
    """Steps of a stream alone: the drafter has up to 60 nodes, and the curve chooses of these. Noise only adds time."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        context = int(random.integers(1, 3000))
        nodes = min(best_nodes(curve, context, random.uniform(0.3, 0.95)), int(60 * random.random() ** 3))
        disturbed = 1 + noise * random.exponential() * (1 if random.random() < 0.9 else 10)
        curve.observe(context, 1, nodes + 1, factor * true_seconds(context, nodes + 1) * disturbed)


def worst_choice(curve: CostCurve) -> float:
    """The share of tokens per second that the curve's choices reach, at worst, of what the best choices reach."""
    shares = []
    for context in CONTEXTS:
        for chance in (0.3, 0.6, 0.8, 0.9, 0.95):
            chosen, best = (
                (1 - chance ** (1 + nodes)) / (1 - chance) / true_seconds(context, 1 + nodes)
                for nodes in (best_nodes(each, context, chance) for each in (curve, true_curve()))
            )
            shares.append(chosen / best)
    return min(shares)


tables = st.lists(st.lists(st.floats(1e-5, 10.0), min_size=8, max_size=8), min_size=3, max_size=3)
observations = st.tuples(
    st.integers(0, 5000), st.integers(1, 4), st.integers(1, MAX_NODES + 1), st.floats(1e-6, 100.0), st.booleans()
)


@given(tables, st.lists(observations, max_size=8))
def test_more_nodes_and_longer_contexts_never_cost_less(table: list[list[float]], steps: list[Any]) -> None:
    """Whatever was measured and observed; and what was saved is the same curve."""
    curve = CostCurve(NODES, CONTEXTS, table)
    for context, streams, rows, seconds, alone in steps:
        curve.observe(context, 1 if alone else min(streams, rows), rows, seconds)
    grid = np.array([curve.at(context) for context in (1, 64, 100, 512, 1000, 2048, 9000)])
    assert (grid > 0).all()
    assert (np.diff(grid, axis=0) >= -1e-12 * grid[1:]).all()
    assert (np.diff(grid, axis=1) >= -1e-12 * grid[:, 1:]).all()
    assert curve.row_seconds >= 0 and curve.stream_seconds >= 0
    assert np.array_equal(parse(json.dumps(curve.state())).seconds, curve.seconds)


@pytest.mark.parametrize("seed", range(2))
def test_a_curve_of_a_busy_minute_heals(seed: int) -> None:
    """All points are too high, by a factor of 1.5 to 3 and each by up to half more; some answers correct them."""
    random = np.random.default_rng(seed)
    seconds = true_curve(random.uniform(1.5, 3)).seconds
    curve = CostCurve(NODES, CONTEXTS, seconds * random.uniform(1, 1.5, seconds.shape), 0.002, 0.01)
    serve(curve, 300, noise=0.05, seed=seed)
    assert worst_choice(curve) > 0.85
    for context in CONTEXTS:
        assert curve.at(context)[3] == pytest.approx(true_seconds(context, 4), rel=0.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": [], "contexts": [], "seconds": []},
        *(
            {"nodes": nodes}
            for nodes in ([0, 1, 2], [1, 2, MAX_NODES], [0, MAX_NODES, 1], [[0, 1, MAX_NODES]], 3, ["a", "b", 5])
        ),
        *({"contexts": contexts} for contexts in ([512, 64], [0, 64], None)),
        *({"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3, last]]} for last in (0.0, -1.0, math.inf, math.nan, None)),
        {"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3]]},
        {"row_seconds": -1.0},
        {"stream_seconds": None},
    ],
    ids=str,
)
def test_a_cost_file_that_is_no_curve_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|array|invalid|Error"):
        parse(json.dumps(CURVE.state() | changes))
