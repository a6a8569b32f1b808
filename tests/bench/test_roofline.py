"""The prediction's arithmetic, and the saved result."""

import json

import pytest

from bench.model.counts import PARTS, Counts
from bench.roofline import ASSUMED, RESULT, predict
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
