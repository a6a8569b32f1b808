"""Linear layers in the layout that this CPU multiplies fastest.

A tree of a few dozen rows is too small for the usual matrix product, which rearranges the weights at every call. oneDNN
lets us do that once. Promises the same layers up to rounding.
"""

from __future__ import annotations

import torch

ROWS = 16  # what the layout is chosen for: one token and a small tree


def multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., in_features] to [..., out_features], in the part of Python that TorchScript has; a trace takes no such operator."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result


class PackedLinear(torch.nn.Module):
    """Takes the place of a torch.nn.Linear; its weights are kept packed only."""

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
    """The model computes on a CPU, in numbers that oneDNN packs."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_layers(model: torch.nn.Module) -> None:
    """Packs every plain linear layer of the model, in place. The caller has asked `can_pack`."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            # A subclass, of the layer or of its weights' tensor (a quantised one), computes something else.
            if type(child) is torch.nn.Linear and type(child.weight.data) is torch.Tensor:
                setattr(parent, name, PackedLinear(child))
