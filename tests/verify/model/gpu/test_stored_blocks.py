"""Quantised weights of files on a GPU: the values that the CPU's reader has, and products of them, in any number of rows."""

from typing import Any

import pytest
import torch

from outrider.verify.model.cpu.native.weights import KINDS as CPU_KINDS
from outrider.verify.model.cpu.native.weights import Kind
from outrider.verify.model.gpu.forms import common_form
from outrider.verify.model.gpu.quantized import BlockLinear, Blocks, joined_blocks
from outrider.verify.model.gpu.stored_blocks import KINDS, as_blocks
from outrider.verify.model.stored import Stored
from tests.verify.model.cpu.native.test_weights import STORED, dequantized, random_blocks
from tests.verify.model.gpu.conftest import DEVICE

OUTPUTS, INPUTS = 20, 512
EACH = pytest.mark.parametrize("kind", [CPU_KINDS[kind] for kind in KINDS])
# Of each way that kernels read blocks: with and without factors and minimums, of 8 and 4 bits, and of 4-bit floats.
READ = (Kind.Q4_0, Kind.ZERO4, Kind.ZERO8, Kind.Q4_K, Kind.Q6_K, Kind.NVFP4)


def blocks_of(kind: Kind, seed: int = 0, scales: torch.Tensor | None = None) -> Blocks:
    rows = torch.from_numpy(random_blocks(kind, OUTPUTS, INPUTS, seed)).to(DEVICE)
    return as_blocks(rows, KINDS[STORED[kind]], scales)


def layer(kind: Kind, dtype: torch.dtype, scales: torch.Tensor | None = None) -> BlockLinear:
    return BlockLinear.of(blocks_of(kind, scales=scales), dtype)


@EACH
def test_weights_are_those_of_the_file(kind: Kind) -> None:
    found = blocks_of(kind)
    expected = torch.from_numpy(dequantized(kind, random_blocks(kind, OUTPUTS, INPUTS))).to(DEVICE)
    assert found.form == KINDS[STORED[kind]].form
    if kind in (Kind.INT4, Kind.Q4_K):  # minimums are rounded to 2 ** -17 of the scale
        assert ((found.weights() - expected).abs() <= 2**-16 * expected.unflatten(1, (-1, 32)).abs().amax()).all()
    else:
        assert torch.equal(found.weights(), expected)
    assert torch.equal(Blocks.of_bytes(found.bytes, found.form, OUTPUTS, INPUTS).weights(), found.weights())


@EACH
def test_weights_are_times_the_scales_of_outputs(kind: Kind) -> None:
    blocks, scales = random_blocks(kind, OUTPUTS, INPUTS), torch.rand(OUTPUTS)
    expected = Stored(blocks, STORED[kind], (OUTPUTS, INPUTS)).times(scales.numpy()).floats()
    found = blocks_of(kind, scales=scales.to(DEVICE)).weights()
    torch.testing.assert_close(found.cpu(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("scales", [None, torch.rand(OUTPUTS) + 0.5], ids=["", "scaled"])
def test_the_kernel_has_the_same_weights(kind: Kind, scales: torch.Tensor | None) -> None:
    """Rows that have one input each give the weights, in float32 where products are exact."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    found = layer(kind, dtype, None if scales is None else scales.to(DEVICE))
    expected = found.blocks.weights().to(dtype).T
    given = found(torch.eye(INPUTS, dtype=dtype, device=DEVICE))
    if scales is None:
        assert torch.equal(given, expected)
    else:  # zeros are rounded to 2 ** -17 of the scale
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", READ)
def test_a_row_has_the_same_bits_in_any_number_of_rows(kind: Kind) -> None:
    found, half = layer(kind, torch.bfloat16), torch.randn(72, INPUTS // 2, device=DEVICE).bfloat16()
    rows = torch.cat([half, -half.flip(1)], 1)
    whole = found(rows)
    expected = rows.double() @ found.blocks.weights().double().T
    assert (whole - expected).norm() < 1e-2 * expected.norm()
    for count in (1, 3, 20):
        assert torch.equal(found(rows[:count].flip(0)), whole[:count].flip(0)), count


@pytest.mark.parametrize(
    "kinds",
    [(Kind.Q4_K, Kind.Q6_K), (Kind.Q5_K, Kind.Q6_K), (Kind.Q4_0, Kind.INT4), (Kind.Q5_0, Kind.INT8), (Kind.MXFP4, Kind.MXFP4)],
)
def test_layers_of_several_kinds_become_one(kinds: tuple[Kind, Kind]) -> None:
    parts = [blocks_of(kind, seed) for seed, kind in enumerate(kinds)]
    found, expected = joined_blocks(parts).weights(), torch.cat([each.weights() for each in parts])
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-16 * float(expected.abs().max()))


def test_kinds_without_a_common_form() -> None:
    forms: Any = [KINDS[STORED[kind]].form for kind in (Kind.Q4_K, Kind.INT8, Kind.NVFP4)]
    assert common_form(forms[:2]) is None and common_form(forms[1:]) is None
