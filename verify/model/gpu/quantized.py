"""Weights of 8 or 4 bits on a GPU: blocks of inputs with a scale, and with 4 bits a minimum.

They are those of a CPU, up to ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch

from outrider.verify.model.sizes import PackedLayer

# Inputs that share a scale, and those whose values share words.
BLOCK, GROUP = 32, 128
LARGEST = 127  # of 8 bits
# With 4 bits, narrower ranges round finer, but clip; the one with the smallest squared error is chosen.
SHARES = (1.0, 0.94, 0.88, 0.82)
# The outputs that are quantised at once.
CHUNK = 4096


class Blocks(NamedTuple):
    """The weights of a layer.

    A word has a value of each half of its group with 8 bits, and of each quarter with 4; the first one is in its lowest bits.
    With 8 bits, a weight is (value - 128) * scale; with 4, it is (128 + value) * scale + (minimum - 128 * scale) in float32.
    That equals value * scale + minimum, except that minimums below scale / 64 may be off by 2 ** -17 of the scale.
    """

    inputs: int
    words: torch.Tensor  # int16 [outputs, groups * GROUP * bits / 16]
    scales: torch.Tensor  # float16 [outputs, groups * GROUP / BLOCK]; zeros behind the inputs
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
        lower, upper = self.words.unsqueeze(-1).view(torch.uint8).unbind(-1)
        kinds = (lower, upper) if self.minimums is None else (lower & 15, lower >> 4, upper & 15, upper >> 4)
        values = torch.stack([each.unflatten(1, (-1, GROUP // len(kinds))) for each in kinds], 2)
        values, scales = values.float().view(len(values), -1, BLOCK), self.scales.float()[..., None]
        if self.minimums is None:
            found = (values - 128) * scales
        else:
            found = (values + 128) * scales + (self.minimums.float()[..., None] - 128 * scales)
        return found.flatten(1)[:, : self.inputs]


def rows_of(parts: Sequence[torch.Tensor], in_turns: bool = False) -> torch.Tensor:
    """Joins tensors of rows, one after the other or in turns."""
    return torch.stack(list(parts), 1).flatten(0, 1) if in_turns else torch.cat(list(parts))


def _joined(parts: Sequence[Blocks], in_turns: bool = False) -> Blocks:
    """Joins the weights of several layers, or parts of one, into one."""
    minimums = [each.minimums for each in parts if each.minimums is not None]
    words, scales = (rows_of(each, in_turns) for each in ([part.words for part in parts], [part.scales for part in parts]))
    return Blocks(parts[0].inputs, words, scales, rows_of(minimums, in_turns) if minimums else None)


def _blocks(weights: torch.Tensor, bits: int) -> Blocks:
    """Blocks of weights float32 [outputs, blocks, BLOCK]."""
    values, scales, minimums = _rounded(weights, bits)
    return in_words(values.to(torch.int16) + (128 if bits == 8 else 0), scales, minimums if bits == 4 else None)


def in_words(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> Blocks:
    """Blocks of values [outputs, blocks, BLOCK] from 0 to 255, or with `minimums` to 15."""
    missing = -scales.shape[1] % (GROUP // BLOCK)
    pad = torch.nn.functional.pad
    groups = pad(values.to(torch.uint8), (0, 0, 0, missing)).view(len(values), -1, GROUP)
    if minimums is not None:
        minimums, (first, second, third, fourth) = pad(minimums, (0, missing)), groups.unflatten(2, (4, -1)).unbind(2)
        lower, upper = first | second << 4, third | fourth << 4
    else:
        lower, upper = groups.unflatten(2, (2, -1)).unbind(2)
    words = torch.stack([lower, upper], -1).view(torch.int16).flatten(1)
    return Blocks(values.shape[1] * BLOCK, words, pad(scales, (0, missing)), minimums)


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
        from outrider.verify.model.gpu import triton_products as products  # Triton is only needed on a GPU

        super().__init__(linear, blocks.words.device)
        self.blocks, self._product = blocks, products.linear
        self.weights = products.Weights(*blocks[1:], self.bias, products.counters(len(blocks.words), blocks.words.device))
        self.nbytes = sum(each.nbytes for each in blocks[1:] if each is not None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._product(rows, *self.weights)
        return found

    @property
    def arrived(self) -> torch.Tensor:
        return self.weights.arrived

    def apart(self) -> BlockLinear:
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
