"""Packed weights: what they hold, their products, and that variants of the library compute the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native import weights as packed
from outrider.verify.model.cpu.native.library import Engine, compiled_library, load
from outrider.verify.model.cpu.native.variants import runnable
from outrider.verify.model.cpu.native.weights import KINDS, Kind, Weights
from outrider.verify.model.stored import Stored, StoredType, Zeroed

SIZES: dict[StoredType, tuple[int, int]] = {**GGML_QUANT_SIZES, Zeroed.ZERO4: (32, 19), Zeroed.ZERO8: (32, 35)}

STORED: dict[Kind, StoredType] = {kind: type for type, kind in KINDS.items()}
# Where blocks have float16: of scales, and of minimums. Elsewhere, they begin with one.
FACTORS: dict[Kind, tuple[int, ...]] = {kind: (0, 2) for kind in (Kind.INT4, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)}
FACTORS |= {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.TQ1_0: (52,), Kind.TQ2_0: (64,)}
DEVIATION = 0.05  # of the weights


def random_blocks(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of weights [outputs, inputs], uint8 [outputs, bytes], as a file has them."""
    generator: Any = np.random.default_rng(seed)
    per_block, size = SIZES[STORED[kind]]
    blocks = generator.integers(0, 256, (outputs, inputs // per_block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:  # scales are powers of two, 2 ** (byte - 127)
        blocks[..., 0] = generator.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(outputs, -1)  # type: ignore[no-any-return]
    if kind == Kind.NVFP4:  # float8_e4m3 scales without a sign
        blocks[..., :4] = generator.integers(1, 30, (*blocks.shape[:2], 4))
        return blocks.reshape(outputs, -1)  # type: ignore[no-any-return]
    places = FACTORS.get(kind, (0,))
    factors = generator.standard_normal((len(places), *blocks.shape[:2], 1))

    def scaled(factor: float) -> Any:
        for place, values in zip(places, factors, strict=True):
            halves = (values * factor).astype(np.float16)
            if kind == Kind.IQ1_M:  # four bits of it are above the scales in each of the last four integers
                scales = blocks[..., 48:].view(np.uint16)
                scales[...] = (scales & 0xFFF) | (halves.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16)) << 12
            else:
                blocks[..., place : place + 2] = halves.view(np.uint8)
        return blocks.reshape(outputs, -1)

    deviation = dequantized(kind, scaled(1)).std()
    return scaled(DEVIATION / deviation)  # type: ignore[no-any-return]


def dequantized(kind: Kind, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights of rows of blocks, float32 [outputs, inputs]."""
    per_block, size = SIZES[STORED[kind]]
    return Stored(blocks, STORED[kind], (len(blocks), blocks.shape[1] // size * per_block)).floats()


pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
ROUNDED = [kind for kind in Kind if kind <= Kind.INT4]  # to which any weights are rounded
# The largest relative error of a weight, in its block's range: half a step, and the rounding of the scale to float16.
STEP = {Kind.FLOAT32: 0.0, Kind.BFLOAT16: 2**-8, Kind.INT8: 0.51 / 127, Kind.INT4: 0.16}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(2)


def multiply(weights: Weights, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    address = None if bias is None else bias.data_ptr()
    return torch.from_numpy(packed.multiply(weights.engine, weights.matrix, rows.contiguous().numpy(), address))


def unpacked(weights: Weights) -> torch.Tensor:
    return torch.from_numpy(weights.unpack(np.arange(weights.outputs)))


def weights_of(engine: Engine, kind: Kind, outputs: int, inputs: int) -> Weights:
    if kind in ROUNDED:
        return Weights.of(engine, kind, matrix(outputs, inputs).numpy())
    return stored_in(engine, kind, random_blocks(kind, outputs, inputs), inputs)


def stored_in(engine: Engine, kind: Kind, blocks: np.ndarray, inputs: int) -> Weights:
    return Weights.stored(engine, Stored(blocks, STORED[kind], (len(blocks), inputs)))


def matrix(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(outputs, inputs, generator=generator)
    return torch.where(torch.rand(found.shape, generator=generator) < 0.001, 20 * found, found)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("outputs", [1, 31, 200])
def test_weights_are_rounded_within_their_block(engine: Engine, kind: Kind, outputs: int) -> None:
    given = matrix(outputs, 96)
    found = unpacked(Weights.of(engine, kind, given.numpy()))
    largest = given.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert ((found - given).unflatten(1, (-1, 32)).abs() <= STEP[kind] * largest).all()


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows as quantised weights are multiplied with: in blocks of 32, whose largest value is 254 steps."""
    blocks = rows.unflatten(1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 254
    values: torch.Tensor = (blocks.double() * (1 / scales).double()).round() * scales.double()
    return values.flatten(1)


@pytest.mark.parametrize("kind", Kind)
def test_products_are_those_of_the_rounded_weights(engine: Engine, kind: Kind) -> None:
    weights = weights_of(engine, kind, 100, 512)
    rows, bias = matrix(40, 512, seed=1), torch.randn(100)
    values = rounded(rows) if kind.is_quantized else rows.double()
    assert (values - rows).norm() < 0.005 * rows.norm()
    exact = values @ unpacked(weights).double().T + bias
    assert (multiply(weights, rows, bias) - exact).norm() < 2e-6 * exact.norm()


@pytest.mark.parametrize("kind", Kind)
@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 60), count=st.integers(1, 40))
def test_a_row_has_the_same_bits_beside_any_others(engine: Engine, kind: Kind, first: int, count: int) -> None:
    weights, rows = weights_of(engine, kind, 70, 256), matrix(100, 256, seed=2)
    assert torch.equal(multiply(weights, rows[first : first + count]), multiply(weights, rows)[first : first + count])


@pytest.mark.parametrize("kind", Kind)
def test_every_variant_computes_the_same_bits_in_any_number_of_threads(kind: Kind) -> None:
    engines = [Engine(threads, load(file)) for file in runnable() for threads in (1, 3)]
    assert engines
    rows = torch.cat([matrix(20, 768, seed=4), torch.zeros(1, 768)])
    products = [multiply(weights_of(engine, kind, 90, 768), rows) for engine in engines]
    assert all(torch.equal(each, products[0]) for each in products)


@pytest.mark.parametrize("kind", Kind)
def test_nan_in_a_row_stays_in_that_row(engine: Engine, kind: Kind) -> None:
    rows = torch.randn(3, 256)
    rows[1, 5] = torch.nan
    found = multiply(weights_of(engine, kind, 40, 256), rows)
    assert found[1].isnan().all()
    assert not found[[0, 2]].isnan().any()


def test_a_library_of_other_kinds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled_library()
    assert library is not None and sum(kind.is_quantized for kind in Kind) == structures.FORMATS
    monkeypatch.setattr(structures, "FORMATS", structures.FORMATS + 1)
    assert not structures.fit(library)


@pytest.mark.parametrize("outputs", [1, 50])
@pytest.mark.parametrize("kind", STORED)
def test_blocks_of_a_file_keep_their_values_in_every_variant(kind: Kind, outputs: int) -> None:
    blocks = random_blocks(kind, outputs, 768)
    for file in runnable():
        weights = stored_in(Engine(2, load(file)), kind, blocks, 768)
        assert torch.equal(unpacked(weights), torch.from_numpy(dequantized(kind, blocks))), file.name


@pytest.mark.parametrize("kind", [Kind.INT8, Kind.INT4])
def test_weights_on_the_steps_of_a_block_are_packed_as_a_file_has_them(engine: Engine, kind: Kind) -> None:
    levels = torch.randint(-127, 128, (40, 24, 32)) if kind == Kind.INT8 else torch.randint(0, 16, (40, 24, 32))
    levels[..., :2] = torch.tensor([-127, 127] if kind == Kind.INT8 else [0, 15])  # the whole range, so that no step is lost
    minimum = torch.zeros(()) if kind == Kind.INT8 else torch.tensor(-0.5)
    scale = torch.tensor(0.0625)
    fields = [scale, minimum][: 1 if kind == Kind.INT8 else 2]
    head = np.tile(np.array(fields, np.float16).view(np.uint8), (40, 24, 1))
    values = levels.numpy().astype(np.uint8)
    body = values if kind == Kind.INT8 else values[..., :16] | values[..., 16:] << 4
    stored = stored_in(engine, kind, np.concatenate([head, body], -1).reshape(40, -1), 768)
    rounded = Weights.of(engine, kind, (levels * scale + minimum).flatten(1).numpy())
    assert np.array_equal(rounded.data, stored.data)


@pytest.mark.parametrize("kind", [Kind.FLOAT32, Kind.INT4, Kind.Q6_K])
def test_weights_that_are_packed_in_parts_are_the_same(engine: Engine, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_of(engine, kind, 200, 256)
    monkeypatch.setattr(packed, "AT_ONCE", 70 * 256)  # of 64, and the last one of 8, in a panel that is not full
    assert np.array_equal(weights_of(engine, kind, 200, 256).data, whole.data)
