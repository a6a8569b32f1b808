"""torchao's weights on a GPU: each choice of `model.quantize` can be made and multiplied, with what is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.model.fake_cuda import CUDA, fake_cuda
from outrider.verify.errors import ModelError
from outrider.verify.model.gpu.quantized import quantize_on_gpu

pytest.importorskip("torchao")
INPUTS, OUTPUTS = 1024, 512


@pytest.fixture(autouse=True)
def weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake weights refuse to be moved in place; these are on the device from the beginning."""
    monkeypatch.setattr(torch.utils, "swap_tensors", lambda *_: None)


def quantized(name: str, dtype: torch.dtype) -> torch.nn.Linear:
    """A layer that is quantised on a fake GPU."""
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(torch.empty(OUTPUTS, INPUTS, dtype=dtype, device=CUDA), requires_grad=False)
    quantize_on_gpu(torch.nn.Sequential(layer), name, CUDA, [layer])
    return layer


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most_bytes"), [("int8", 1.1), ("int4", 0.7), ("fp8", 1.1)])
def test_a_layer_is_quantised_and_multiplied(name: str, most_bytes: float) -> None:
    with fake_cuda():
        layer = quantized(name, torch.bfloat16)
        weight: Any = layer.weight
        parts = [getattr(weight, each) for each in weight.__tensor_flatten__()[0]]
        assert sum(part.nbytes for part in parts) <= most_bytes * INPUTS * OUTPUTS
        assert layer(torch.empty(3, INPUTS, dtype=torch.bfloat16, device=CUDA)).shape == (3, OUTPUTS)


@pytest.mark.slow
def test_what_torchao_cannot_quantise_is_an_error() -> None:
    with fake_cuda(), pytest.raises(ModelError, match=r"choose another model\.quantize or model\.dtype: Only bfloat16"):
        quantized("int4", torch.float16)
