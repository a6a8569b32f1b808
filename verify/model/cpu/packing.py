"""Linear layers with weights packed for oneDNN.

The usual matrix product repacks the weights in every call, which dominates when a forward has only a few dozen rows. Packing
once avoids that. Results are equal up to rounding.

oneDNN compiles a kernel for each number of rows and keeps the latest 1,024, a few hundred kB each. Chunks of a prompt have any
length, so their rows are padded to a few dozen sizes: memory stays bounded, and kernels are compiled once.
"""

from __future__ import annotations

import torch

from drafters.interface import MAX_NODES

ROWS = 16  # batch size that the layout is optimised for: one token and a small tree


def padded_count(count: int, exact: int = MAX_NODES + 1) -> int:
    """The number of rows that a product of `count` rows has. Trees are not padded, chunks of prompts by an eighth at most."""
    if count <= exact:
        return count
    step = 8
    while 16 * step < count:
        step *= 2
    return (count + step - 1) // step * step


def multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., N, in_features] to [..., N, out_features]. Scriptable, because torch.jit.trace does not support this operator."""
    count = rows.size(-2)
    padding = padded_count(count) - count
    if padding > 0:
        rows = torch.nn.functional.pad(rows, [0, 0, 0, padding])
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result.narrow(-2, 0, count) if padding > 0 else result


class PackedLinear(torch.nn.Module):
    """Replaces a torch.nn.Linear; only the packed weights are kept."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias, self.dtype = linear.bias, weight.dtype
        self.weight = torch.empty(0, dtype=weight.dtype)  # some models ask for its dtype
        self.multiply = multiply
        self.nbytes: int = weight.nbytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., N, in_features] to [..., N, out_features]."""
        return self.multiply(rows, self.packed, self.bias)


def can_pack(model: torch.nn.Module) -> bool:
    """Whether the model is on a CPU and its dtype can be packed by oneDNN."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_layers(model: torch.nn.Module) -> None:
    """Packs every plain linear layer of the model in place. Requires `can_pack`."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            # Subclasses, of the layer or of the weight tensor (quantised), may compute something else.
            if type(child) is torch.nn.Linear and type(child.weight.data) is torch.Tensor:
                setattr(parent, name, PackedLinear(child))


def packed_layers(model: torch.nn.Module) -> list[PackedLinear]:
    """The packed layers, in module order."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]
