"""Linear layers with packed weights, and those that are packed for oneDNN.

The usual matrix product repacks the weights in every call, which dominates when a forward has only a few dozen rows. Packing
once avoids that. Results are equal up to rounding.

oneDNN compiles a kernel for each number of rows and keeps the latest 1,024, a few hundred kB each. Chunks of a prompt have any
length, so many rows are padded to a few dozen sizes: memory stays bounded, and kernels are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch

from outrider.verify.model.private_torch import multiply_onednn, pack_onednn

# Up to this many rows, each number of rows has a kernel of its own.
EXACT_ROWS = 65
# Layers of these classes may be replaced.
PLAIN = ("Linear", "FalconLinear")
# The layout is optimised for this many rows: one token and a small tree.
ROWS = 16


def padded_count(count: int, exact: int = EXACT_ROWS) -> int:
    """The number of rows that a product of `count` rows has. Small trees are not padded, other rows by an eighth at most."""
    if count <= exact:
        return count
    step = 8
    while 16 * step < count:
        step *= 2
    return (count + step - 1) // step * step


def multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., N, in_features] to [..., N, out_features]. Scriptable."""
    count = rows.size(-2)
    padding = padded_count(count) - count
    if padding > 0:
        rows = torch.nn.functional.pad(rows, [0, 0, 0, padding])
    result = multiply_onednn(rows, packed, bias)
    return result.narrow(-2, 0, count) if padding > 0 else result


class PackedLayer(torch.nn.Module):
    """Replaces a torch.nn.Linear; only the packed weights and the bias are kept.

    `multiply` is a scriptable function of the rows, `packed`, the tensors of `constants` and the bias.
    """

    is_quantized = False
    kernel = ""  # name of the kernel, for people

    def __init__(self, multiply: Callable[..., torch.Tensor], linear: torch.nn.Linear, packed: torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.weight = torch.empty(0, dtype=self.dtype)  # some models ask for its dtype; one that computes with it is refused
        self.bias, self.packed, self.multiply = linear.bias, packed, multiply
        self.constants: tuple[torch.Tensor, ...] = ()
        self.nbytes = 0  # bytes of the weights

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., N, in_features] to [..., N, out_features]."""
        return self.multiply(rows, self.packed, *self.constants, self.bias)


class PackedLinear(PackedLayer):
    """A layer with the weights of the linear layer, packed."""

    kernel = "oneDNN"

    def __init__(self, linear: torch.nn.Linear) -> None:
        weight = linear.weight.detach()
        super().__init__(multiply, linear, pack_onednn(weight, ROWS))
        self.nbytes = weight.nbytes


def is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether the module is a linear layer that may be replaced.

    Other subclasses, of the layer or of the weight tensor (quantised), may compute something else. Falcon's adds the bias
    to a rounded product.
    """
    return isinstance(module, torch.nn.Linear) and type(module).__name__ in PLAIN and type(module.weight.data) is torch.Tensor


def packed_layers(model: torch.nn.Module) -> list[PackedLayer]:
    """The packed layers, in module order."""
    return [module for module in model.modules() if isinstance(module, PackedLayer)]
