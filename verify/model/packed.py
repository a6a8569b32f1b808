"""Linear layers whose weights are kept in another form, on a CPU or a GPU."""

from __future__ import annotations

from typing import TypeGuard

import torch


class PackedLayer(torch.nn.Module):
    """Replaces a torch.nn.Linear, [..., N, in_features] to [..., N, out_features]; of it, only the bias is kept."""

    is_quantized = False
    kernel = ""  # name of the kernel, for people

    def __init__(self, linear: torch.nn.Linear, device: torch.device) -> None:
        """`device` is that of the packed weights."""
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        # Some models ask for its data type and device; one that computes with it is refused.
        self.weight = torch.empty(0, dtype=self.dtype, device=device)
        self.bias = linear.bias
        self.nbytes = 0  # bytes of the weights


def is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether the module is a linear layer that may be replaced.

    Subclasses, of the layer or of the weight tensor (quantised), may compute something else.
    """
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


def packed_layers(model: torch.nn.Module) -> list[PackedLayer]:
    """The packed layers, in module order."""
    return [module for module in model.modules() if isinstance(module, PackedLayer)]
