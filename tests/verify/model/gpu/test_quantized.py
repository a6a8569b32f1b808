"""Weights of 8 and 4 bits: those of a CPU, and products that equal those with the weights unpacked."""

import numpy as np
import pytest
import torch

from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.weights import Kind, Weights
from outrider.verify.model.gpu.quantized import Blocks, quantized
from outrider.verify.model.gpu.text_work import ROWS
from tests.verify.model.gpu.conftest import DEVICE

KINDS = {8: Kind.INT8, 4: Kind.INT4}
BITS = pytest.mark.parametrize("bits", KINDS)


def layer(inputs: int, outputs: int, bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(inputs)
    return torch.nn.Linear(inputs, outputs, bias, DEVICE, torch.bfloat16).requires_grad_(False)


@BITS
@pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
def test_the_weights_are_those_of_a_cpu(bits: int) -> None:
    torch.manual_seed(bits)
    weight = torch.randn(70, 160) * torch.rand(70, 160)
    weight[3, :32], weight[4, 32:64] = 0.0, 0.25
    expected = torch.from_numpy(Weights.of(Engine.shared(), KINDS[bits], weight.numpy()).unpack(np.arange(70)))
    found = Blocks.of(weight, bits).weights()
    assert found.shape == weight.shape
    equal = (found == expected).double().mean()
    assert equal == 1 if bits == 8 else equal > 0.99  # of 4 bits, two ranges may have errors that differ by rounding alone
    assert (found - weight).norm() < 1.01 * (expected - weight).norm()


@BITS
def test_the_kernel_has_the_same_weights(bits: int) -> None:
    """Rows that have one input each give the weights, in float32 where products are exact."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    blocks = quantized(layer(224, 70).to(dtype), bits, DEVICE)
    assert torch.equal(blocks(torch.eye(224, dtype=dtype, device=DEVICE)), blocks.blocks.weights().to(dtype).T)


@BITS
def test_a_row_has_the_same_bits_in_any_number_of_rows(bits: int) -> None:
    blocks, rows = quantized(layer(320, 200), bits, DEVICE), torch.randn(ROWS[-1], 320, device=DEVICE).bfloat16()
    whole = blocks(rows)
    for count in (*ROWS[:-1], 20, 200):
        assert torch.equal(blocks(rows[:count].flip(0)), whole[:count].flip(0)), count
