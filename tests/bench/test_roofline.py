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
from outrider.verify.model.gpu.triton_products import Gpu, Tile, splits_of

H200 = Gpu(132, 226 << 10, 90)
READABLE = 1e12
# The products of Llama-3.1-8B that an H200 was timed with: inputs, outputs, and how many of them a forward has.
PRODUCTS = {
    "qkv": (4096, 6144, 32), "o": (4096, 4096, 32), "gate_up": (4096, 28_672, 32), "down": (14_336, 4096, 32),
    "head": (4096, 128_256, 1),
}  # fmt: skip
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


def fitted(count: int, inputs: int, outputs: int, tile: Tile, splits: int) -> float:
    """Seconds of a product on an H200, by a fit to its times: reading the memory, reading the cache, and the splits' parts."""
    read = tile.busiest_bytes(count, outputs, splits, H200) * inputs / splits
    parts = 8 * splits * count * outputs if splits > 1 else 0
    return float(((2 * inputs * outputs / 4.5e12) ** 4 + (read / 65e9) ** 4) ** 0.25 + parts / 7e12 + 4e-6)


def before(count: int, outputs: int) -> Tile:
    """The tile with which the products were timed."""
    tile = Tile.of(count, outputs, 1, H200)
    return tile._replace(outputs=128 if tile.rows > 16 and outputs >= 128 * 128 else 64)


def test_products_of_many_rows_are_computed_from_their_tiles() -> None:
    """By a fit that explains the times of the tiles before: 1.11 with 64 rows, and 1.20 with 72."""
    timed = json.loads((RESULT.parent / "gpu-h200.json").read_text())["kernels, rewritten"]["products: ours, cuBLAS by rows"]
    found, explained, now = dict[int, float](), dict[int, float](), dict[int, float]()
    for count in (1, 32, 64, 72, 128):
        for name, (inputs, outputs, number) in PRODUCTS.items():
            splits = 2 if outputs == 4096 else 1
            found[count] = found.get(count, 0.0) + 1e-6 * number * timed[name][str(count)][0]
            old = fitted(count, inputs, outputs, before(count, outputs), splits)
            explained[count] = explained.get(count, 0.0) + number * old
            splits = splits_of(inputs, outputs)
            new = fitted(count, inputs, outputs, Tile.of(count, outputs, splits, H200), splits)
            now[count] = now.get(count, 0.0) + number * new
    assert explained == pytest.approx(found, rel=0.06)
    assert (ASSUMED.rows_64, ASSUMED.rows_72) == pytest.approx((now[64] / now[1], now[72] / now[1]), abs=0.005)


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
