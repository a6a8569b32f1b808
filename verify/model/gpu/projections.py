"""The linear layers of a model on a GPU: those that read the same rows, such as q, k and v, are merged into one product.

So there are fewer and larger kernels. Plain layers are computed by a kernel of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

# The names of such layers in transformers' models, in the order in which they are called.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedLinear(torch.nn.Module):
    """The first layer of a group, which computes the product of all. The others give their parts of it."""

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        with torch.device("meta"):
            self.product = torch.nn.Linear(layers[0].in_features, sum(self.sizes), bias=False)
        self.product.weight = torch.nn.Parameter(torch.cat([layer.weight.data for layer in layers]), requires_grad=False)
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        if biases:
            self.product.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
        self.rows: torch.Tensor | None = None  # of the last product
        self.parts: tuple[torch.Tensor, ...] = ()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The first layer's output, a view of the product."""
        self.rows, self.parts = rows, self.product(rows).split(self.sizes, -1)
        return self.parts[0]

    @property
    def weight(self) -> torch.Tensor:
        """Those of all layers, [outputs, inputs]."""
        return self.product.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Those of all layers, [outputs]."""
        return self.product.bias


class MergedPart(torch.nn.Module):
    """Another layer of a group."""

    def __init__(self, merged: MergedLinear, number: int) -> None:
        super().__init__()
        self._merged = (merged,)  # not a child: its parameters are counted once
        self._number = number

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The layer's output: a view of the product if these rows were the first layer's, too, else a product of its own."""
        [merged] = self._merged
        if merged.rows is rows:
            return merged.parts[self._number]
        weight = merged.weight.split(merged.sizes)[self._number]
        bias = None if merged.bias is None else merged.bias.split(merged.sizes)[self._number]
        return torch.nn.functional.linear(rows, weight, bias)


def use_kernels(model: torch.nn.Module) -> None:
    """Prepares the model's linear layers for forwards on its GPU, in place. They keep their weights."""
    from outrider.verify.model.gpu.triton_products import use_kernel  # Triton is only needed on a GPU

    merge_projections(model)
    use_kernel(module for module in model.modules() if is_plain(module))


def merge_projections(model: torch.nn.Module) -> None:
    """Merges the groups of the model's plain linear layers, in place."""
    for parent in list(model.modules()):
        for names in GROUPS:
            layers = [each for name in names if is_plain(each := getattr(parent, name, None))]
            if len(layers) == len(names) and are_alike(layers):
                merged = MergedLinear(layers)
                for number, name in enumerate(names):
                    setattr(parent, name, MergedPart(merged, number) if number else merged)


def is_plain(module: torch.nn.Module | None) -> TypeGuard[torch.nn.Linear]:
    """Whether the module is a linear layer whose weights are plain numbers; quantised ones are of several tensors."""
    return type(module) is torch.nn.Linear and not hasattr(module.weight, "__tensor_flatten__")


def are_alike(layers: Sequence[torch.nn.Linear]) -> bool:
    """Whether the layers can be one: they have inputs of one width, and biases, type and device in common."""
    kinds = {(each.in_features, each.bias is None, each.weight.dtype, each.weight.device) for each in layers}
    return len(kinds) == 1
