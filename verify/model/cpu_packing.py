"""Linear layers with weights packed for oneDNN.

The usual matrix product repacks the weights in every call, which dominates when a forward has only a few dozen rows. Packing
once avoids that. Results are equal up to rounding.
"""

from __future__ import annotations

import torch

ROWS = 16  # batch size that the layout is optimised for: one token and a small tree


def multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., in_features] to [..., out_features]. Scriptable, because torch.jit.trace does not support this operator."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result


class PackedLinear(torch.nn.Module):
    """Replaces a torch.nn.Linear; only the packed weights are kept."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias = linear.bias
        self.multiply = multiply
        self.nbytes: int = weight.nbytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
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
