"""Packed layers give the same results up to rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verify.model.batch import ForwardBatch
from verify.model.cpu_packing import PackedLinear, can_pack, pack_layers
from verify.model.runner import ModelRunner


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 17, 65])
def test_packed_layer_equals_linear(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 33, bias=bias)
    given = torch.randn(1, rows, 48)
    with torch.inference_mode():
        assert torch.allclose(PackedLinear(linear)(given), linear(given), atol=1e-5)


def test_only_plain_linear_layers_are_packed() -> None:
    class Other(torch.nn.Linear):
        pass

    inner = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), inner, Other(4, 4), torch.nn.ReLU())
    assert can_pack(model)
    pack_layers(model)
    assert [type(module) for module in model] == [PackedLinear, torch.nn.Sequential, Other, torch.nn.ReLU]
    assert type(inner[0]) is PackedLinear


def test_a_packed_model_can_get_another_runner(tiny_config: LlamaConfig) -> None:
    torch.manual_seed(0)
    first = ModelRunner(LlamaForCausalLM(tiny_config), pack=True)
    again = ModelRunner(first.model, 64, pack=True)
    assert again.weight_bytes == first.weight_bytes
    batch = ForwardBatch.chain(torch.arange(5))
    assert torch.equal(again.forward(again.new_cache(), batch), first.forward(first.new_cache(), batch))


def test_half_precision_is_not_packed() -> None:
    assert not can_pack(torch.nn.Linear(4, 4).half())
