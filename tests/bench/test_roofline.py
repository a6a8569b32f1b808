"""The prediction's arithmetic, and the saved result."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.model.counts import PARTS, Counts
from bench.roofline import (
    ASSUMED,
    GPUS,
    MODELS,
    MODELS_OF_GPU,
    RESULT,
    Model,
    counts_of,
    figures_of_gpu,
    gpt_fast_launches,
    predict,
    predict_forward,
    prediction,
    run,
)

READABLE = 1e12
# At this speed, a gigabyte takes a millisecond.
GIGABYTE = 1e9 * ASSUMED.kernel


def step(linear: float = 10.0) -> Counts:
    """Gigabytes of linear layers, and one of each other part; 100 launches of each."""
    sizes = dict.fromkeys(PARTS, GIGABYTE) | {"linear": linear * GIGABYTE}
    return Counts(sizes, dict.fromkeys(PARTS, 100), weight_bytes=linear * GIGABYTE, text_bytes=GIGABYTE, flops=1e9)


def test_a_step_is_the_sum_of_its_parts() -> None:
    found = predict(step(), 0, READABLE, flops=1e15)
    assert found["linear"] == pytest.approx(10e-3)
    assert found["sampling"] == pytest.approx(1e-3 * (1.0 - ASSUMED.cached))
    assert found["launches"] == pytest.approx(400 * ASSUMED.launch_seconds)
    assert found["host"] == pytest.approx(0.2e-3)


@pytest.mark.parametrize(("nodes", "ratio"), [(63, ASSUMED.rows_64), (64, ASSUMED.rows_72)])
def test_products_of_many_rows_and_drafts_take_time(nodes: int, ratio: float) -> None:
    """Whatever the rows of the products are, the weights count once."""
    counts = step()
    counts.bytes["linear"] *= 1.05
    found = predict(counts, nodes, READABLE, flops=1e15)
    assert found["linear"] == pytest.approx(10e-3 * ratio)
    assert found["host"] == pytest.approx(0.4e-3)


@pytest.mark.parametrize(("cached", "handed_on"), [(0.0, 1e-3), (0.5, 0.5e-3)])
def test_what_stays_in_the_cache_takes_no_time(cached: float, handed_on: float) -> None:
    found = predict(step(), 0, READABLE, 1e15, replace(ASSUMED, cached=cached))
    assert [found[part] for part in PARTS] == pytest.approx([10e-3, 1e-3, handed_on, handed_on])


def test_products_may_be_limited_by_arithmetic() -> None:
    assert predict(step(), 0, READABLE, flops=1e9)["linear"] == 1.0


def test_a_forward_has_no_sampling() -> None:
    expected = (11.0 + 1.0 - ASSUMED.cached) * 1e-3 + 300 * ASSUMED.launch_seconds + ASSUMED.packing_seconds
    assert predict_forward(step(), 0, READABLE) == pytest.approx(expected)


def test_rows_of_a_prediction() -> None:
    plain, tree = prediction("some", Model(lambda: None, 100, 30.0), "L4", {0: step(), 64: step()})
    assert not plain["fits"]
    assert plain["over_plain"] == 1.0
    assert tree["over_plain"] == pytest.approx(tree["step_ms"] / plain["step_ms"], abs=1e-3)
    assert plain["share_of_sheet"] == pytest.approx(0.9 * plain["share_of_readable"], abs=1e-3)
    peer = plain["ms"]["linear"] + plain["ms"]["attention"] + 1e3 * 1104 * ASSUMED.launch_seconds
    assert plain["gpt_fast_ms"] == pytest.approx(peer, abs=0.01)


def test_the_speed_of_a_kernel_follows_from_the_published_figure() -> None:
    """Llama-2-7B on an A100 that reads 1,700 GB/s: 1,397.31 GB/s at 104.9 tokens/s."""
    in_kernels = 1 / 104.9 - gpt_fast_launches(32) * ASSUMED.launch_seconds
    assert round(1397.31e9 / 104.9 / in_kernels / 1700e9, 2) == ASSUMED.kernel


def test_no_models_are_no_rows() -> None:
    pytest.importorskip("triton")
    assert run({}, GPUS)["predictions"] == []


def test_the_saved_result_has_all_models_and_these_assumptions() -> None:
    results = json.loads(RESULT.read_text())
    assert set(results["counts"]) == {*MODELS, *MODELS_OF_GPU}
    for row in results["predictions"]:
        model = (MODELS | MODELS_OF_GPU)[row["model"]]
        assert row in prediction(row["model"], model, row["gpu"], counts_of(results, row["model"]))
    assert set(figures_of_gpu(results, READABLE)) == {"single_token_step_share_of_bandwidth", "nodes_over_single"}
