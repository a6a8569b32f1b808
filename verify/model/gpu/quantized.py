"""Weights of 8 or 4 bits on a GPU, in planes: values, their scales, and with some forms minimums, and factors of both.

Rounded weights are those of a CPU, up to ties. Those of files have values and scales as the file has them
(`outrider.verify.model.gpu.stored_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from math import prod
from typing import Any, NamedTuple

import torch

from outrider.verify.model.gpu.forms import BLOCK, GROUP, SPAN, Form, common_form, sizes_of
from outrider.verify.model.sizes import PackedLayer

LARGEST = 127  # of 8 bits
# With 4 bits, narrower ranges round finer, but clip; the one with the smallest squared error is chosen.
SHARES = (1.0, 0.94, 0.88, 0.82)
# The outputs that are quantised at once.
CHUNK = 4096


class Blocks(NamedTuple):
    """The weights of a layer.

    A word has a value of each half of its group with 8 bits, and of each quarter with 4; the first one is in its lowest bits.
    A weight is (value - zero) * scale + minimum, where zero is 128 with 8 bits, 8 with 4 bits without minimums, and else 0.
    With 4 bits and minimums, kernels compute (128 + value) * scale + (minimum - 128 * scale) in float32, so that minimums
    below scale / 64 may be off by 2 ** -17 of the scale.

    Scales and minimums of int8 are multiplied by the factors of their span. Other factors are of whole outputs; there,
    minimums of int8 count scales.
    """

    inputs: int
    words: torch.Tensor  # int16 [outputs, groups * GROUP * bits / 16]
    scales: torch.Tensor  # [outputs, groups * GROUP / group]; zeros behind the inputs
    minimums: torch.Tensor | None = None  # the same
    factors: torch.Tensor | None = None  # [outputs, spans, 2], of scales and of minimums

    @staticmethod
    def of(weight: torch.Tensor, bits: int) -> Blocks:
        """A weight [outputs, inputs], rounded as by `outrider.verify.model.cpu.native`; inputs are whole blocks."""
        return joined_blocks([_blocks(part.float().unflatten(1, (-1, BLOCK)), bits) for part in weight.split(CHUNK)])

    @staticmethod
    def of_bytes(content: torch.Tensor, form: Form, outputs: int, inputs: int) -> Blocks:
        """The blocks of `Blocks.bytes`, uint8."""
        planes = form.planes(outputs, inputs)
        parts = content.split([prod(shape) * dtype.itemsize for dtype, shape in planes])
        words, scales, *others = (
            part.view(dtype).view(shape) for part, (dtype, shape) in zip(parts, planes, strict=True)
        )  # fmt: skip
        minimums = others.pop(0) if form.minimums is not None else None
        return Blocks(inputs, words, scales, minimums, *others)

    @property
    def planes(self) -> list[torch.Tensor]:
        return [each for each in self[1:] if each is not None]

    @property
    def bytes(self) -> torch.Tensor:
        """All planes, uint8."""
        return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in self.planes])

    @property
    def form(self) -> Form:
        bits, group = sizes_of(self.words, self.scales, self.inputs)
        types = [None if each is None else each.dtype for each in (self.minimums, self.factors)]
        return Form(bits, group, self.scales.dtype, *types)

    @property
    def values(self) -> torch.Tensor:
        """Uint8 [outputs, groups * GROUP]."""
        lower, upper = self.words.unsqueeze(-1).view(torch.uint8).unbind(-1)
        kinds = (lower, upper) if self.form.bits == 8 else (lower & 15, lower >> 4, upper & 15, upper >> 4)
        return torch.stack([each.unflatten(1, (-1, GROUP // len(kinds))) for each in kinds], 2).flatten(1)

    def weights(self) -> torch.Tensor:
        """Float32 [outputs, inputs], as kernels have them."""
        form = self.form
        values = self.values.float().view(len(self.words), -1, form.group)
        units, least = self.scales.float(), None if self.minimums is None else self.minimums.float()
        if self.factors is not None:
            factors = self.factors.float()
            if form.scales == torch.int8:
                factors = factors.repeat_interleave(SPAN // form.group, 1)[:, : units.shape[1]]
            units = units * factors[..., 0]
        if least is not None and form.minimums == torch.int8 != form.scales:
            least = least * units
        elif least is not None and self.factors is not None:
            least = least * factors[..., 1]
        units, least = units[..., None], None if least is None else least[..., None]
        if form.scales == torch.bfloat16:
            found = torch.tensor(FLOAT4, device=values.device)[values.long()] * units
        elif form.bits == 8 or least is None:
            found = (values - (128 if form.bits == 8 else 8)) * units
            found = found if least is None else found + least
        else:
            found = (values + 128) * units + (least - 128 * units)
        return found.flatten(1)[:, : self.inputs]

    def take(self, outputs: torch.Tensor) -> Blocks:
        """The weights of some outputs, int64."""
        found: list[Any] = [None if each is None else each[outputs] for each in self[1:]]
        return Blocks(self.inputs, *found)

    def widened(self, form: Form) -> Blocks:
        """The same weights in a form that `common_form` has found."""
        if self.form == form:
            return self
        repeats, minimums, blocks = self.form.group // form.group, self.minimums, self
        if self.form.bits < form.bits:
            values = self.values.view(len(self.words), -1, form.group).to(torch.int16)
            blocks = in_words(values + 128 - (8 if minimums is None else 0), self.scales, None)
        scales = self.scales.repeat_interleave(repeats, 1)
        if form.minimums is not None:
            minimums = (
                torch.zeros_like(scales, dtype=form.minimums) if minimums is None else minimums.repeat_interleave(repeats, 1)
            )
        factors = None if self.factors is None or form.factors is None else self.factors.to(form.factors)
        return Blocks(self.inputs, blocks.words, scales, minimums, factors)


# Twice the values of 4-bit floats (e2m1).
FLOAT4 = [sign * size for sign in (1.0, -1.0) for size in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)]


def rows_of(parts: Sequence[torch.Tensor], in_turns: bool = False) -> torch.Tensor:
    """Joins tensors of rows, one after the other or in turns."""
    return torch.stack(list(parts), 1).flatten(0, 1) if in_turns else torch.cat(list(parts))


def joined_blocks(parts: Sequence[Blocks], in_turns: bool = False) -> Blocks:
    """Joins the weights of several layers, or parts of one, into one. They have a common form."""
    form = common_form(each.form for each in parts)
    assert form is not None
    planes: Iterable[Any] = zip(*(each.widened(form)[1:] for each in parts), strict=True)
    joined: list[Any] = [None if each[0] is None else rows_of(each, in_turns) for each in planes]
    return Blocks(parts[0].inputs, *joined)


def _blocks(weights: torch.Tensor, bits: int) -> Blocks:
    """Blocks of weights float32 [outputs, blocks, BLOCK]."""
    values, scales, minimums = _rounded(weights, bits)
    return in_words(values.to(torch.int16) + (128 if bits == 8 else 0), scales, minimums if bits == 4 else None, bits)


def in_words(
    values: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    bits: int = 8,
    factors: torch.Tensor | None = None,
) -> Blocks:
    """Blocks of values [outputs, blocks, group], up to 255, or with 4 bits 15; scales and minimums are [outputs, blocks]."""
    outputs, blocks, group = values.shape
    pad = (0, -blocks % (GROUP // group))
    groups = torch.nn.functional.pad(values.to(torch.uint8), (0, 0, *pad)).view(outputs, -1, GROUP)
    if bits == 4:
        first, second, third, fourth = groups.unflatten(2, (4, -1)).unbind(2)
        lower, upper = first | second << 4, third | fourth << 4
    else:
        lower, upper = groups.unflatten(2, (2, -1)).unbind(2)
    words = torch.stack([lower, upper], -1).view(torch.int16).flatten(1)
    minimums = None if minimums is None else torch.nn.functional.pad(minimums, pad)
    return Blocks(blocks * group, words, torch.nn.functional.pad(scales, pad), minimums, factors)


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
        arrived, split = (
            products.counters(len(blocks.words), blocks.words.device),
            products.split_of(blocks.inputs, len(blocks.words)),
        )
        self.weights = products.Weights(*blocks[1:], self.bias, arrived, split)
        self.nbytes = sum(each.nbytes for each in blocks.planes)

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
    def of(blocks: Blocks, dtype: torch.dtype, bias: torch.Tensor | None = None) -> BlockLinear:
        """A layer of these weights, for rows of this type."""
        with torch.device("meta"):
            linear = torch.nn.Linear(blocks.inputs, len(blocks.words), bias=False, dtype=dtype)
        linear.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
        return BlockLinear(linear, blocks)

    @staticmethod
    def joined(layers: Sequence[BlockLinear], in_turns: bool) -> BlockLinear:
        """One layer with the outputs of all, one after the other or in turns, which have the same inputs and a common form."""
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        blocks = joined_blocks([layer.blocks for layer in layers], in_turns)
        return BlockLinear.of(blocks, layers[0].dtype, rows_of(biases, in_turns) if biases else None)


def quantized(linear: torch.nn.Linear, bits: int, device: torch.device) -> BlockLinear:
    """The layer on this device, with its weights rounded to `bits`. The given layer does not keep its weights."""
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
    found = BlockLinear(linear, Blocks.of(linear.weight.detach().to(device), bits))
    linear.weight = torch.nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
    return found
