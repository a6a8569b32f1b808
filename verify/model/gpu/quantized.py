"""Weights of 8 or 4 bits on a GPU, by torchao, the optional extra `torchao`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from outrider.verify.errors import ModelError, first_sentence

# With 4 bits, this many inputs share a scale.
GROUP = 32
# The format of 4 bits for which PyTorch itself has kernels; torchao's default needs another package.
INT4_FORMAT = "tile_packed_to_4d"


def check_installed() -> None:
    """Raises ModelError if torchao is not installed."""
    if find_spec("torchao") is None:
        raise ModelError("model.quantize needs torchao on a GPU; install it with pip install 'outrider[torchao]'.")


def quantize_on_gpu(model: torch.nn.Module, name: str, device: torch.device, layers: Sequence[torch.nn.Module]) -> None:
    """Moves these layers of the model to the device one by one, and keeps their weights in fewer bits there.

    Raises ModelError if torchao cannot do so for this type of weights or this device.
    """
    from torchao import quantization as ao

    configs: dict[str, Any] = {
        "int8": ao.Int8WeightOnlyConfig,
        "int4": lambda: ao.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=INT4_FORMAT),
        "fp8": ao.Float8WeightOnlyConfig,
    }
    chosen = set(map(id, layers))
    try:
        ao.quantize_(model, configs[name](), lambda module, _: id(module) in chosen, device=device)
    except (ImportError, AssertionError, ValueError, NotImplementedError) as error:
        raise ModelError(
            f"torchao cannot quantise this model to {name} on {device}; choose another model.quantize or model.dtype:"
            f" {first_sentence(error)}"
        ) from None
