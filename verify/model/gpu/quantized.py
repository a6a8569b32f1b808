"""Weights of 8 or 4 bits on a GPU: blocks of inputs with a scale, and with 4 bits a minimum.

They are those of a CPU, up to ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch

from outrider.verify.model.packed import PackedLayer

# Inputs that share a scale.
BLOCK = 32
# With 4 bits, a byte holds an input and the one HALF behind it.
HALF = 64
LARGEST = 127  # of 8 bits
# With 4 bits, narrower ranges round finer, but clip; the one with the smallest squared error is chosen.
SHARES = (1.0, 0.94, 0.88, 0.82)
# The outputs that are quantised at once.
CHUNK = 4096


class Blocks(NamedTuple):
    """The weights of a layer."""

    values: torch.Tensor  # int8 [outputs, inputs]; with 4 bits uint8 [outputs, HALF * ceil(inputs / (2 * HALF))]
    scales: torch.Tensor  # float16 [outputs, inputs / BLOCK]
    minimums: torch.Tensor | None = None  # the same; with 4 bits

    @staticmethod
    def of(weight: torch.Tensor, bits: int) -> Blocks:
        """A weight [outputs, inputs], rounded as by `outrider.verify.model.cpu.native`; inputs are whole blocks."""
        parts = [_blocks(part.float().unflatten(1, (-1, BLOCK)), bits) for part in weight.split(CHUNK)]
        return _joined(parts)

    @property
    def bits(self) -> int:
        return 8 if self.minimums is None else 4

    def weights(self) -> torch.Tensor:
        """Float32 [outputs, inputs]."""
        values, count = self.values, self.scales.shape[1]
        if self.minimums is not None:
            pairs = values.unflatten(1, (-1, 1, HALF))
            values = torch.cat([pairs & 15, pairs >> 4], 2).flatten(1)[:, : count * BLOCK]
        found: torch.Tensor = values.float().unflatten(1, (-1, BLOCK)) * self.scales.float()[..., None]
        if self.minimums is not None:
            found += self.minimums.float()[..., None]
        return found.flatten(1)


def rows_of(parts: Sequence[torch.Tensor], in_turns: bool = False) -> torch.Tensor:
    """Joins tensors of rows, one after the other or in turns."""
    return torch.stack(list(parts), 1).flatten(0, 1) if in_turns else torch.cat(list(parts))


def _joined(parts: Sequence[Blocks], in_turns: bool = False) -> Blocks:
    """Joins the weights of several layers, or parts of one, into one."""
    minimums = [each.minimums for each in parts if each.minimums is not None]
    values, scales = (rows_of(each, in_turns) for each in zip(*(part[:2] for part in parts), strict=True))
    return Blocks(values, scales, rows_of(minimums, in_turns) if minimums else None)


def _blocks(weights: torch.Tensor, bits: int) -> Blocks:
    """Blocks of weights float32 [outputs, blocks, BLOCK]."""
    values, scales, minimums = _rounded(weights, bits)
    if bits == 8:
        return Blocks(values.flatten(1).to(torch.int8), scales)
    inputs = values[0].numel()
    whole = torch.nn.functional.pad(values.flatten(1).to(torch.uint8), (0, -inputs % (2 * HALF)))
    lower, upper = whole.unflatten(1, (-1, 2, HALF)).unbind(2)
    return Blocks((lower | upper << 4).flatten(1), scales, minimums)


def _rounded(blocks: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and minimums, float16 [..., blocks], of weights float32 [..., blocks, BLOCK]."""
    low, high = blocks.amin(-1), blocks.amax(-1)
    if bits == 8:
        scales = (torch.maximum(-low, high) / LARGEST).half()
        values = _divided(blocks, scales).clamp(-LARGEST, LARGEST)
        return values, scales, torch.zeros_like(scales)
    values, scales, minimums, least = _of_range(blocks, low, high, SHARES[0])
    for share in SHARES[1:]:
        *tried, error = _of_range(blocks, low, high, share)
        better = error < least
        values = torch.where(better[..., None], tried[0], values)
        scales, minimums = torch.where(better, tried[1], scales), torch.where(better, tried[2], minimums)
        least = torch.minimum(least, error)
    return values, scales, minimums


def _of_range(
    blocks: torch.Tensor, low: torch.Tensor, high: torch.Tensor, share: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales, minimums and squared errors of blocks that are rounded to a share of their range."""
    scales = ((high - low) * share / 15).half()
    minimums = ((high + low) / 2 - 7.5 * scales.float()).half()
    least = minimums.float()[..., None]
    values = _divided(blocks - least, scales).clamp(0, 15)
    return values, scales, minimums, (values * scales.float()[..., None] + least - blocks).square().sum(-1)


def _divided(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The nearest whole numbers of scales; 0 where the scale is 0."""
    divisors = scales.float()[..., None]
    return torch.where(divisors > 0, blocks / divisors, 0.0).round()


class BlockLinear(PackedLayer):
    """A linear layer whose weights are blocks."""

    kernel, is_quantized = "Triton", True

    def __init__(self, linear: torch.nn.Linear, blocks: Blocks) -> None:
        from outrider.verify.model.gpu.triton_products import Weights, counters  # only needed on a GPU
        from outrider.verify.model.gpu.triton_products import linear as multiply

        super().__init__(multiply, linear, blocks.values)
        self.blocks = blocks
        self.weights = Weights(*blocks, self.bias, counters(len(blocks.values), blocks.values.device))
        self.nbytes = sum(each.nbytes for each in blocks if each is not None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.multiply(rows, *self.weights)

    @property
    def arrived(self) -> torch.Tensor:
        """See `outrider.verify.model.gpu.triton_products.KernelLinear`."""
        return self.weights.arrived

    def apart(self) -> BlockLinear:
        """See `outrider.verify.model.gpu.triton_products.KernelLinear.apart`."""
        found = copy(self)
        found.weights = self.weights._replace(arrived=torch.zeros_like(self.weights.arrived))
        return found

    @staticmethod
    def joined(layers: Sequence[BlockLinear], in_turns: bool) -> BlockLinear:
        """One layer with the outputs of all, one after the other or in turns, which have the same inputs and number of bits."""
        first, outputs = layers[0], sum(layer.out_features for layer in layers)
        with torch.device("meta"):
            linear = torch.nn.Linear(first.in_features, outputs, bias=False, dtype=first.dtype)
        if biases := [layer.bias.data for layer in layers if layer.bias is not None]:
            linear.bias = torch.nn.Parameter(rows_of(biases, in_turns), requires_grad=False)
        return BlockLinear(linear, _joined([layer.blocks for layer in layers], in_turns))


def quantized(linear: torch.nn.Linear, bits: int, device: torch.device) -> BlockLinear:
    """The layer on this device, with its weights rounded to `bits`. The given layer does not keep its weights."""
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
    found = BlockLinear(linear, Blocks.of(linear.weight.detach().to(device), bits))
    linear.weight = torch.nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
    return found
