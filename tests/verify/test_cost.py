"""The cost curve and that of experts: measured once, saved, never wrong by what is told, and healed by what steps take."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import models
from outrider.drafters.interface import MAX_NODES, Source, chain
from outrider.verify import measurement
from outrider.verify.budget import Budget, Draft, divide_nodes
from outrider.verify.cost import CostCurve, ExpertCost, Kind, Touched, kinds_of_step, parse
from outrider.verify.measurement import NODES, Point, load_or_measure, measure, started, step_seconds
from outrider.verify.model import backend
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.torch_runner import TorchRunner
from tests.trees import tree_of
from tests.verify.model.cpu.native import models as models_of_library
from tests.verify.model.cpu.native.models import runner_of
from tests.verify.model.families import build

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


def test_a_point_that_is_far_too_high_heals_in_a_few_steps() -> None:
    """Other work has disturbed its measurement, and its price lets few steps choose it."""
    seconds = true_curve().seconds.copy()
    seconds[:, 2:] *= 1.75
    curve = CostCurve(NODES, CONTEXTS, seconds)
    for step in range(60):
        rows = 4 if step % 10 == 9 else 1
        curve.observe(100, 1, rows, true_seconds(100, rows))
    assert curve.of_step(100, 1, 4) / curve.of_step(100, 1, 1) == pytest.approx(
        true_seconds(100, 4) / true_seconds(100, 1), rel=0.2
    )


def test_an_estimate_of_a_pause_lowers_what_the_start_disturbed() -> None:
    curve, seconds = true_curve(), true_curve().seconds.copy()
    seconds[:, 2:4] *= 1.75
    disturbed = CostCurve(NODES, CONTEXTS, seconds)
    disturbed.is_estimated = True
    disturbed.lower(CostCurve(NODES, CONTEXTS, np.tile(1.01 * curve.seconds[0], (len(CONTEXTS), 1))))
    assert disturbed.seconds == pytest.approx(curve.seconds, rel=0.05)  # long contexts, too
    assert not disturbed.is_estimated and disturbed.is_corrected


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


MEASURED = CostCurve(NODES, (64,), [[0.1] * len(NODES)], 0.01, 0.02)


def test_a_curve_is_measured_once_and_saved(tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "costs"
    curve = load_or_measure(tiny_runner, folder)
    assert (curve.seconds > 0).all()
    assert curve.seconds.shape == (len(curve.contexts), len(NODES))
    with monkeypatch.context() as patched:
        patched.setattr(measurement, "measure", lambda _: pytest.fail("measured again"))
        assert load_or_measure(tiny_runner, folder).state() == curve.state()


@pytest.mark.parametrize(("streams", "nodes"), [(1, 63), (4, 0), (4, 15)])
def test_rows_that_are_timed_use_the_experts_of_any_text(streams: int, nodes: int) -> None:
    """And not those of one token: the cost of reading experts is most of what rows of a mixture cost."""
    runner, used = TorchRunner(build("qwen3_moe", NAME, num_experts=64, num_local_experts=64)), set[int]()
    runner.model.model.layers[0].mlp.experts.register_forward_pre_hook(
        lambda _, inputs: used.update(inputs[1].flatten().tolist())
    )
    context = 8
    step_seconds([started(runner, context) for _ in range(streams)], Point(context, nodes))
    rows, of_row = streams * (nodes + 1), runner.model.config.num_experts_per_tok
    expected = 64 * (1 - (1 - of_row / 64) ** rows)  # of rows that choose at random
    assert len(used) > expected / 2 > of_row


def test_the_experts_of_a_mixture_are_measured_apart() -> None:
    runner = runner_of(models_of_library.build("qwen3_moe"), 256)
    curve = measure(runner, (0, 7))
    assert curve.experts is not None
    assert (curve.experts.count, curve.experts.used) == runner.experts == (12, 3)
    assert curve.experts.seconds >= 0 and (curve.seconds > 0).all()


def test_a_curve_is_estimated_where_all_rows_cost_alike(tmp_path: Path) -> None:
    """A few steps tell it at the start; it is saved once steps have corrected it."""
    runner = backend.load_model(LoadOptions(str(models.TARGET), device="cpu", context_tokens=1024))
    curve = load_or_measure(runner, tmp_path)
    assert not list(tmp_path.iterdir())
    assert (curve.nodes[-1], curve.contexts) == (MAX_NODES, (64, 512))
    assert (np.diff(curve.seconds, axis=1) >= 0).all() and (curve.seconds > 0).all()


def test_an_estimate_waits_for_times_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """If other work disturbed all steps of one row, further rows would seem free."""
    runner = backend.load_model(LoadOptions(str(models.TARGET), device="cpu", context_tokens=1024))
    disturbed = iter([0.060, 0.070, 0.080, 0.090, 0.070, 0.075, 0.085, 0.080])  # in turns
    times = {0: 0.033, 1: 0.036, 3: 0.049, 7: 0.073}
    monkeypatch.setattr(measurement, "timed_forward", lambda _, __, nodes: next(disturbed, times[nodes]))
    curve = load_or_measure(runner, None)
    assert {nodes: curve.of_step(64, 1, nodes + 1) for nodes in times} == pytest.approx(times)
    assert curve.of_step(64, 1, 16) == pytest.approx(0.073 + 8 * 0.040 / 7)  # as the rows before it


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "[" * 100_000, '{"nodes": [], "contexts": [], "seconds": []}', "\udc80"]
)
def test_an_unusable_cost_file_is_measured_again(
    tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setattr(measurement, "measure", lambda _: MEASURED)
    assert load_or_measure(tiny_runner, tmp_path).state() == MEASURED.state()
    (file,) = tmp_path.iterdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(tiny_runner, tmp_path).state() == MEASURED.state()
    assert [record.getMessage().startswith(str(file)) for record in caplog.records] == [True]
    assert parse(file.read_text()).state() == MEASURED.state()


def test_an_unwritable_folder_is_ignored(tiny_runner: TorchRunner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert load_or_measure(tiny_runner, tmp_path / "file").contexts == measure(tiny_runner).contexts
    assert load_or_measure(TorchRunner(tiny_runner.model, 16), None).contexts == (1,)


COUNT, USED = 32, 4
FIXED, PER_ROW, PER_EXPERT = 0.010, 0.0002, 0.0015
# How much of the experts of a random token a row of each kind touches newly.
TRUTH = {Kind.NEXT: 0.8, Kind.SIBLING: 0.5, Kind.COPY: 0.1, Kind.ROOT: 1.0}


def any_kinds(random: np.random.Generator) -> np.ndarray:
    return random.choice(len(Kind), int(random.integers(1, 12)), p=random.dirichlet(np.ones(len(Kind))))


def touched(kinds: np.ndarray, random: np.random.Generator) -> float:
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
    chances = (0.5 ** np.arange(1, 9)).astype(np.float32)
    drafts = [chain(np.arange(8, dtype=np.int32), chances, source) for source in (Source.LOOKUP, Source.TRIGRAM)]
    counts = [len(divide_nodes([Draft(tree)], [Budget(curve=learned)])[0].tree) for tree in drafts]
    assert counts[0] >= counts[1] + 2


@pytest.mark.parametrize(("probability", "seconds", "nodes"), [(0.11, 0.0, 0), (0.15, 0.0, 1), (0.15, 0.1, 1)])
def test_a_node_is_verified_if_it_clearly_pays(probability: float, seconds: float, nodes: int) -> None:
    """It takes a tenth of a step. What was spent on the draft is spent either way."""
    curve = CostCurve((0, 1, MAX_NODES), (64,), ((0.10, 0.11, 0.3),))
    tree = chain(np.array([5], np.int32), np.array([probability], np.float32), Source.DRAFT)
    budget = Budget(curve=curve)
    budget.draft_seconds = seconds
    assert len(divide_nodes([Draft(tree)], [budget])[0].tree) == nodes


def test_rows_are_told_apart_by_parents_sources_and_streams() -> None:
    tree = tree_of(range(5), (-1, 0, 0, -1, 3), source=[Source.TRIGRAM] * 4 + [Source.RETRIEVAL])
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
