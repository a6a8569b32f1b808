"""Linear layers with weights of 8 or 4 bits for CPUs.

A row has the same bits beside any number of other rows of a step, so a draft changes no answer: `Int8Linear` sums integers,
which is exact, and `Int4Linear`'s kernel sums each output in one order. Chunks of prompts, which have more rows than a step,
are multiplied with unpacked weights of 4 bits: their rows round differently (`Int4Linear.most_rows`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from verify.errors import ModelError
from verify.model.cpu.packing import PackedLayer, padded_count
from verify.model.cpu.unpacking import GROUP, STEP_ROWS, packed_width

INT4_OUTPUTS = 16  # the kernel computes multiples of as many outputs
LARGEST = 127
BLOCK = 512  # outputs quantised at once, which bounds the memory for intermediate values; layouts repeat every 64
# Ends of a group's range, as shares of its own, among which int4 scales are chosen; narrower ranges round finer, but clip.
SHARES = (1.0, 0.94, 0.88, 0.82)


def multiply_int8(
    rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[..., N, in_features] to [..., N, out_features]: rows are quantised by their largest value. Scriptable."""
    values = rows.flatten(0, -2).float()
    # Unsigned with a zero point of 128: without AMX, the kernels for signed activations are slow.
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-20) * (1.0 / 127.0)
    quantized = (values / scale + 128.0).round().to(torch.uint8)
    count = quantized.size(0)
    padding = padded_count(count) - count
    if padding > 0:
        quantized = torch.nn.functional.pad(quantized, [0, 0, 0, padding])
    sums = torch.ops.onednn.qlinear_pointwise(
        quantized, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    result = sums[:count] * scale
    if bias is not None:
        result = result + bias
    shaped: torch.Tensor = result.to(rows.dtype).unflatten(0, rows.size()[:-1])
    return shaped


class Int8Linear(PackedLayer):
    """Weights of 8 bits with a scale per output; activations are quantised by row, and products are summed as integers."""

    is_quantized = True

    def __init__(self, linear: torch.nn.Linear) -> None:
        weight = linear.weight.detach()
        scales = (weight.abs().amax(1).float() / LARGEST).clamp_min(1e-20)
        blocks = zip(weight.split(BLOCK), scales[:, None].split(BLOCK), strict=True)
        values = torch.cat([(block.float() / scale).round().to(torch.int8) for block, scale in blocks])
        super().__init__(multiply_int8, linear, torch.ops.onednn.qlinear_prepack(values, None))
        self.constants = (scales, torch.zeros(self.out_features, dtype=torch.int32))
        self.nbytes = values.nbytes + scales.nbytes


def multiply_int4(
    rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, most: int = STEP_ROWS
) -> torch.Tensor:
    """[..., N, in_features] to [..., N, out_features]; with more than `most` rows, by unpacked weights. Scriptable."""
    values = rows.flatten(0, -2).to(torch.bfloat16)  # the kernel is slow in other types
    if values.size(0) > most:
        result = torch.ops.outrider.multiply_unpacked(values, packed, scales)
    else:
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(values, packed, 32, scales)
    result = result.to(rows.dtype)
    if bias is not None:
        result = result + bias
    shaped: torch.Tensor = result.unflatten(0, rows.size()[:-1])
    return shaped


class Int4Linear(PackedLayer):
    """Weights of 4 bits with a scale and a minimum per group of inputs."""

    is_quantized = True
    most_rows = STEP_ROWS  # up to which a row's bits do not depend on the others

    def __init__(self, linear: torch.nn.Linear) -> None:
        weight = linear.weight.detach()
        packed, scales = [], []
        for block in weight.split(BLOCK):
            values, *floats = quantize_groups(block.float().unflatten(1, (-1, GROUP)))
            packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.flatten(1), 1))
            scales.append(torch.stack(floats, -1).transpose(0, 1))
        super().__init__(multiply_int4, linear, torch.cat(packed))
        self.constants = (torch.cat(scales, 1),)
        packed_width()  # compiles what a prompt needs
        self.nbytes = self.packed.nbytes + self.constants[0].nbytes


def quantize_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 to 15 of groups [outputs, groups, GROUP], with the scale and the value of 8 per group in bfloat16.

    Of several ranges, each group gets the one with the smallest squared error.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, half = (high + low) / 2, (high - low).clamp_min(1e-8) / 2
    chosen = _rounded(groups, middle, half, SHARES[0])
    for share in SHARES[1:]:
        other = _rounded(groups, middle, half, share)
        better = other.errors < chosen.errors
        chosen = _Rounded(*(torch.where(better, new, old) for new, old in zip(other, chosen, strict=True)))
    return chosen.values.to(torch.int32), chosen.scales[..., 0], chosen.centres[..., 0]


class _Rounded(NamedTuple):
    values: torch.Tensor
    scales: torch.Tensor
    centres: torch.Tensor
    errors: torch.Tensor


def _rounded(groups: torch.Tensor, middle: torch.Tensor, half: torch.Tensor, share: float) -> _Rounded:
    """The groups rounded in this share of their range."""
    # Values are chosen by the rounded scales and centres, which the kernel reads.
    scales = (half * (share / 7.5)).to(torch.bfloat16)
    centres = (middle + scales.float() / 2).to(torch.bfloat16)
    values = ((groups - centres.float()) / scales.float() + 8).round().clamp(0, 15)
    errors = ((values - 8) * scales.float() + centres.float() - groups).square().sum(-1, keepdim=True)
    return _Rounded(values, scales, centres, errors)


def can_hold_int4(linear: torch.nn.Linear) -> bool:
    """Whether the kernel for 4 bits takes a layer of this shape."""
    return linear.in_features % GROUP == 0 and linear.out_features % INT4_OUTPUTS == 0


def quantized_layer(linear: torch.nn.Linear, bits: int) -> PackedLayer:
    """The layer with weights of `bits`, or of 8 where the shape does not allow 4."""
    return Int4Linear(linear) if bits == 4 and can_hold_int4(linear) else Int8Linear(linear)


def check_processor() -> None:
    """Raises ModelError if this CPU has no exact 8-bit products."""
    # Without VNNI, oneDNN adds pairs of products in 16 bits, which overflow.
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()):
        raise ModelError("This CPU has no VNNI instructions, which quantised weights need; set model.quantize to none.")
