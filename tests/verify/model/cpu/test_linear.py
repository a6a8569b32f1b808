"""A model's linear layers are replaced by the fastest of this machine."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu import linear
from outrider.verify.model.cpu.linear import ARITHMETIC, can_pack, fastest, mean_times, pack_layers
from outrider.verify.model.cpu.packing import PackedLayer, PackedLinear
from outrider.verify.model.cpu.panel_kernel import Arithmetic
from outrider.verify.model.cpu.panels import PanelLinear, kernel
from outrider.verify.model.runner import ModelRunner


@pytest.mark.parametrize("chosen", [Arithmetic.FLOAT32, None])
def test_only_plain_linear_layers_are_packed(monkeypatch: pytest.MonkeyPatch, chosen: Arithmetic | None) -> None:
    class Other(torch.nn.Linear):
        pass

    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: chosen)
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), inner, Other(4, 4), torch.nn.ReLU())
    assert can_pack(model)
    pack_layers(model)
    first = PanelLinear if chosen and kernel(chosen) else PackedLinear
    assert [type(module) for module in model] == [first, torch.nn.Sequential, Other, torch.nn.ReLU]
    assert type(inner[0]) is PackedLinear  # four outputs fill no panel


def test_a_packed_model_can_get_another_runner(tiny_config: LlamaConfig) -> None:
    torch.manual_seed(0)
    first = ModelRunner(LlamaForCausalLM(tiny_config), pack=True)
    again = ModelRunner(first.model, 64, pack=True)
    assert again.weight_bytes == first.weight_bytes
    batch = ForwardBatch.chain(torch.arange(5))
    assert torch.equal(again.forward(again.new_cache(), batch), first.forward(first.new_cache(), batch))


def test_half_precision_is_not_packed() -> None:
    assert not can_pack(torch.nn.Linear(4, 4).half())


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_fastest_arithmetic_is_chosen(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """oneDNN, which is first, must be faster by a margin."""
    monkeypatch.setattr(linear, "mean_times", lambda layers, dtype: [1.0 + (slow == place) for place in range(len(layers))])
    present = [each for each in ARITHMETIC[torch.bfloat16] if kernel(each)]
    expected = next((each for place, each in enumerate(present, start=1) if place != slow), None)
    assert fastest.__wrapped__(torch.bfloat16, 1) == expected


def test_products_of_all_sizes_are_timed() -> None:
    counts = []

    class Counting(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            counts.append(rows.size(1))
            return rows

    times = mean_times([Counting(), Counting()], torch.float32)
    assert len(times) == 2
    assert min(times) > 0
    assert sorted(set(counts)) == list(linear.ROWS)


def test_packed_layers_replace_those_of_every_dtype() -> None:
    for dtype in ARITHMETIC:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=dtype))
        pack_layers(model)
        assert isinstance(model[0], PackedLayer) or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
