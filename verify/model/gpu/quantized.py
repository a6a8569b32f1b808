"""Weights of 8 or 4 bits on a GPU, by torchao, the optional extra `torchao`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from outrider.verify.errors import ModelError

GROUP = 32  # inputs that share a scale in 4 bits


def check_installed() -> None:
    """Raises ModelError if torchao is not installed."""
    if find_spec("torchao") is None:
        raise ModelError("model.quantize needs torchao on a GPU; install it with pip install 'outrider[torchao]'.")


def quantize_on_gpu(model: torch.nn.Module, name: str, device: torch.device, layers: Sequence[torch.nn.Module]) -> None:
    """Moves these layers of the model to the device one by one, and keeps their weights in fewer bits there."""
    from torchao import quantization as ao

    configs: dict[str, Any] = {
        "int8": ao.Int8WeightOnlyConfig,
        "int4": lambda: ao.Int4WeightOnlyConfig(group_size=GROUP),
        "fp8": ao.Float8WeightOnlyConfig,
    }
    chosen = set(map(id, layers))
    ao.quantize_(model, configs[name](), lambda module, _: id(module) in chosen, device=device)
