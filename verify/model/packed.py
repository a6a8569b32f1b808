"""Linear layers whose weights are kept in another form, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch


class PackedLayer(torch.nn.Module):
    """Replaces a torch.nn.Linear; only the packed weights and the bias are kept.

    `multiply` is a function of the rows, `packed`, the tensors of `constants` and the bias.
    """

    is_quantized = False
    kernel = ""  # name of the kernel, for people

    def __init__(self, multiply: Callable[..., torch.Tensor], linear: torch.nn.Linear, packed: torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        # Some models ask for its data type and device; one that computes with it is refused.
        self.weight = torch.empty(0, dtype=self.dtype, device=packed.device)
        self.bias, self.packed, self.multiply = linear.bias, packed, multiply
        self.constants: tuple[torch.Tensor, ...] = ()
        self.nbytes = 0  # bytes of the weights

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., N, in_features] to [..., N, out_features]."""
        return self.multiply(rows, self.packed, *self.constants, self.bias)


def is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether the module is a linear layer that may be replaced.

    Subclasses, of the layer or of the weight tensor (quantised), may compute something else.
    """
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


def packed_layers(model: torch.nn.Module) -> list[PackedLayer]:
    """The packed layers, in module order."""
    return [module for module in model.modules() if isinstance(module, PackedLayer)]
