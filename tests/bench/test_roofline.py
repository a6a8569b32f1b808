"""The prediction's arithmetic, and the saved result."""

import json

import pytest

from bench.model.counts import PARTS, Counts
from bench.roofline import ASSUMED, RESULT, predict, stored

READABLE = 1e12
LAYER = ("qkv", "o", "gate_up", "down")
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


def test_the_price_of_rows_is_what_products_took() -> None:
    timed = json.loads((RESULT.parent / "gpu-h200-first.json").read_text())["products"]["us"]
    plain, of_64 = (sum(timed[f"{name}_{rows}"][tile] for name in LAYER) for rows, tile in ((1, "64x4"), (64, "64x3")))
    assert of_64 / plain == pytest.approx(ASSUMED.rows_64, abs=0.005)


def test_weights_of_fewer_bits_are_fewer_bytes() -> None:
    found = stored(step(), 4.0)
    assert found.weight_bytes == step().weight_bytes / 4
    assert step().bytes["linear"] - found.bytes["linear"] == pytest.approx(step().weight_bytes * 3 / 4)
