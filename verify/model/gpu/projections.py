"""The linear layers of a model on a GPU: those that read the same rows, such as q, k and v, are merged into one product.

So there are fewer and larger kernels. Plain layers are computed by a kernel of our own.
"""

from collections.abc import Sequence
from typing import TypeGuard, cast

import torch

from outrider.verify.model.gpu.forms import common_form
from outrider.verify.model.gpu.quantized import BlockLinear, rows_of

# The names of such layers in transformers' models, in the order in which they are called. Outputs of the second group take
# turns, so that a kernel has a gate and its value side by side.
GROUPS = {("q_proj", "k_proj", "v_proj"): False, ("gate_proj", "up_proj"): True}


class MergedLinear(torch.nn.Module):
    """The first layer of a group, which computes the product of all. The others give their parts of it."""

    def __init__(self, product: torch.nn.Module, sizes: Sequence[int], in_turns: bool = False) -> None:
        """`product` is the layer that has all outputs, `sizes` of each layer."""
        super().__init__()
        self.product, self.sizes, self.in_turns = product, list(sizes), in_turns
        self.rows: torch.Tensor | None = None  # of the last product
        self.parts: tuple[torch.Tensor, ...] = ()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The first layer's output, a view of the product."""
        self.rows, self.parts = rows, self.outputs(rows)
        return self.parts[0]

    def outputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: torch.Tensor = self.product(rows)
        parts = found.unflatten(-1, (-1, len(self.sizes))).unbind(-1) if self.in_turns else found.split(self.sizes, -1)
        return tuple(parts)

    @property
    def weight(self) -> torch.Tensor:
        """The product's; models ask for its data type."""
        return cast(torch.Tensor, self.product.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        """The product's; some models ask for it."""
        return cast(torch.Tensor | None, self.product.bias)


class MergedPart(torch.nn.Module):
    """Another layer of a group."""

    def __init__(self, merged: MergedLinear, number: int) -> None:
        super().__init__()
        self._merged = (merged,)  # not a child: its parameters are counted once
        self._number = number

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The layer's output: a view of the product if these rows were the first layer's, too, else of another one."""
        [merged] = self._merged
        parts = merged.parts if merged.rows is rows else merged.outputs(rows)
        if self._number == len(merged.sizes) - 1:
            merged.rows, merged.parts = None, ()  # so that the next layer's product may have their memory
        return parts[self._number]


def use_kernels(model: torch.nn.Module) -> None:
    """Prepares the model's linear layers and mixtures for forwards on its GPU, in place. They keep their weights."""
    from outrider.verify.model.gpu.experts import use_experts
    from outrider.verify.model.gpu.triton_products import use_kernel  # Triton is only needed on a GPU

    use_experts(model)
    merge_projections(model)
    use_kernel(module for module in model.modules() if has_plain_weights(module))


def merge_projections(model: torch.nn.Module) -> None:
    """Merges the groups of the model's linear layers, in place."""
    for parent in list(model.modules()):
        for names, in_turns in GROUPS.items():
            layers = [getattr(parent, name, None) for name in names]
            if (product := joined(layers, in_turns)) is not None:
                merged = MergedLinear(product, [layer.out_features for layer in layers if layer is not None], in_turns)
                for number, name in enumerate(names):
                    setattr(parent, name, MergedPart(merged, number) if number else merged)


def joined(layers: Sequence[torch.nn.Module | None], in_turns: bool) -> torch.nn.Module | None:
    """One layer with the outputs of all, one after the other or in turns.

    None unless they are alike: inputs, biases, kind of weights, and device.
    """
    blocks = [layer for layer in layers if isinstance(layer, BlockLinear)]
    if len(blocks) == len(layers):
        kinds = {(each.in_features, each.bias is None, each.dtype, each.weight.device) for each in blocks}
        if len(kinds) > 1 or common_form(each.blocks.form for each in blocks) is None:
            return None
        return BlockLinear.joined(blocks, in_turns)
    plain = [layer for layer in layers if has_plain_weights(layer)]
    alike = {(each.in_features, each.bias is None, each.weight.dtype, each.weight.device) for each in plain}
    if len(plain) < len(layers) or len(alike) > 1:
        return None
    with torch.device("meta"):
        product = torch.nn.Linear(plain[0].in_features, sum(layer.out_features for layer in plain), bias=False)
    product.weight = torch.nn.Parameter(rows_of([layer.weight.data for layer in plain], in_turns), requires_grad=False)
    if biases := [layer.bias.data for layer in plain if layer.bias is not None]:
        product.bias = torch.nn.Parameter(rows_of(biases, in_turns), requires_grad=False)
    return product


def has_plain_weights(module: torch.nn.Module | None) -> TypeGuard[torch.nn.Linear]:
    """Whether the module is a linear layer whose weights are plain numbers; quantised ones are of several tensors."""
    return type(module) is torch.nn.Linear and not hasattr(module.weight, "__tensor_flatten__")
