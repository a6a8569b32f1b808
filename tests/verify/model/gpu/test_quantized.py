"""Weights of 8 and 4 bits: those of a CPU, and products that equal those with the weights unpacked."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.weights import Kind, Weights
from outrider.verify.model.gpu.projections import MergedLinear, merge_projections
from outrider.verify.model.gpu.quantized import BlockLinear, Blocks, quantized
from outrider.verify.model.gpu.text_work import ROWS
from outrider.verify.model.gpu.triton_products import use_kernel
from outrider.verify.model.load_options import Quantization
from outrider.verify.model.quantization import layer_bits
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.test_graphs import Graphed
from tests.verify.model.test_architectures import make

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
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(160, 90, True), pytest.param(512, 3300, False, marks=pytest.mark.slow)]
)
def test_products_are_those_with_the_weights_unpacked(bits: int, inputs: int, outputs: int, bias: bool) -> None:
    plain = layer(inputs, outputs, bias)
    blocks = quantized(layer(inputs, outputs, bias), bits, DEVICE)
    plain.weight.data = blocks.blocks.weights().bfloat16()
    if bias:
        plain.bias.data = blocks.bias.data
    use_kernel([plain])
    for rows in (1, 20, 72):
        given = torch.randn(1, rows, inputs, device=DEVICE).bfloat16()
        found, expected = blocks(given).float(), plain(given).float()
        tolerance = 2e-3 if DEVICE.type == "cuda" else 1e-2  # the interpreter cuts numbers off where a GPU rounds them
        assert (found - expected).norm() <= tolerance * expected.norm()


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


@pytest.fixture(params=["llama", "qwen2"])
def models(request: pytest.FixtureRequest) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A model of blocks of 4 bits, and the same with its weights unpacked."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference, model = (make(request.param, NAME, **sizes).to(DEVICE) for _ in "ab")
    model.load_state_dict(reference.state_dict())
    for name, bits in layer_bits(Quantization("int4"), model).items():
        blocks = quantized(model.get_submodule(name), bits, DEVICE)
        model.set_submodule(name, blocks)
        reference.get_submodule(name).weight = torch.nn.Parameter(blocks.blocks.weights(), requires_grad=False)
    yield model, reference


def test_a_models_layers_are_merged_and_computed(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    model, reference = models
    merge_projections(model)
    assert isinstance(model.model.layers[0].self_attn.q_proj, MergedLinear)
    assert isinstance(model.model.layers[0].self_attn.q_proj.product, BlockLinear)
    batch = ForwardBatch.chain(torch.arange(3, 8))
    expected, _ = Graphed(TorchRunner(reference, started=False), capture=False).both(batch)
    for found in Graphed(TorchRunner(model, started=False), capture=False).both(batch):
        assert torch.allclose(found, expected, atol=1e-4)
