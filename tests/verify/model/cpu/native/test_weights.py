"""Packed weights: what they hold, their products, and that variants of the library compute the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.model.cpu.native import compiled_library
from verify.model.cpu.native.library import FOLDER, VARIANTS, Engine, load, processor_flags
from verify.model.cpu.native.weights import Kind, Weights, product

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
# The largest relative error of a weight, in its block's range: half a step, and the rounding of the scale to float16.
STEP = {Kind.FLOAT32: 0.0, Kind.BFLOAT16: 2**-8, Kind.INT8: 0.51 / 127, Kind.INT4: 0.16}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(2)


def multiply(weights: Weights, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return product(weights.engine, weights.kind, weights.outputs, weights.inputs, weights.data, rows, bias)


def matrix(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Weights with a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(outputs, inputs, generator=generator)
    return torch.where(torch.rand(found.shape, generator=generator) < 0.001, 20 * found, found)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("outputs", [1, 31, 200])
def test_weights_are_rounded_within_their_block(engine: Engine, kind: Kind, outputs: int) -> None:
    given = matrix(outputs, 96)
    found = Weights.of(engine, kind, given).unpack(torch.arange(outputs))
    largest = given.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert ((found - given).unflatten(1, (-1, 32)).abs() <= STEP[kind] * largest).all()


@pytest.mark.parametrize("kind", Kind)
def test_products_are_those_of_the_rounded_weights(engine: Engine, kind: Kind) -> None:
    weights = Weights.of(engine, kind, matrix(100, 320))
    rows, bias = matrix(40, 320, seed=1), torch.randn(100)
    exact = rows.double() @ weights.unpack(torch.arange(100)).double().T + bias
    assert (multiply(weights, rows, bias) - exact).norm() < (2e-4 if kind.is_quantized else 2e-6) * exact.norm()


@pytest.mark.parametrize("kind", Kind)
@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 60), count=st.integers(1, 40))
def test_a_row_has_the_same_bits_beside_any_others(engine: Engine, kind: Kind, first: int, count: int) -> None:
    weights, rows = Weights.of(engine, kind, matrix(70, 64)), matrix(100, 64, seed=2)
    assert torch.equal(multiply(weights, rows[first : first + count]), multiply(weights, rows)[first : first + count])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", Kind)
def test_threads_change_no_bit(engine: Engine, kind: Kind, threads: int) -> None:
    given, rows = matrix(300, 64), matrix(9, 64, seed=3)
    found = [multiply(Weights.of(each, kind, given), rows) for each in (engine, Engine(threads))]
    assert torch.equal(*found)


def variants() -> list[Path]:
    """The libraries that run on this CPU."""
    flags = processor_flags()
    return [file for name, needed in VARIANTS.items() if needed <= flags for file in FOLDER.glob(f"_{name}.*")]


@pytest.mark.parametrize("kind", Kind)
def test_every_variant_computes_the_same_bits(kind: Kind) -> None:
    engines = [Engine(1, load(file)) for file in variants()]
    assert engines
    given, rows = matrix(90, 352), torch.cat([matrix(20, 352, seed=4), torch.zeros(1, 352)])
    products = [multiply(Weights.of(engine, kind, given), rows) for engine in engines]
    assert all(torch.equal(each, products[0]) for each in products)


@pytest.mark.parametrize("kind", Kind)
def test_zeros_stay_zeros(engine: Engine, kind: Kind) -> None:
    assert not multiply(Weights.of(engine, kind, torch.zeros(20, 64)), torch.randn(3, 64)).any()
    assert not multiply(Weights.of(engine, kind, torch.randn(20, 64)), torch.zeros(3, 64)).any()


@pytest.mark.parametrize("kind", Kind)
def test_nan_in_a_row_stays_in_that_row(engine: Engine, kind: Kind) -> None:
    rows = torch.randn(3, 64)
    rows[1, 5] = torch.nan
    found = multiply(Weights.of(engine, kind, torch.randn(40, 64)), rows)
    assert found[1].isnan().all()
    assert not found[[0, 2]].isnan().any()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_file_keep_their_values(engine: Engine, name: str) -> None:
    stored = GGMLQuantizationType[name]
    blocks = quants.quantize(matrix(50, 96).numpy(), stored)
    weights = Weights(engine, Kind.INT8 if name == "Q8_0" else Kind.INT4, 50, 96)
    weights.pack_blocks(0, int(stored), blocks)
    expected = torch.from_numpy(quants.dequantize(blocks, stored).astype(np.float32))
    assert (weights.unpack(torch.arange(50)) - expected).abs().max() <= 1e-6 * expected.abs().max()
