"""Products of many rows with weights of 4 bits, by the ordinary product in bfloat16.

torch's kernel for 4 bits unpacks the weights again for every few rows, which suits steps. Here they are unpacked once for all
rows, a few MB at a time. The results of the two differ by rounding, so callers choose by the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import torch

from drafters.interface import MAX_NODES
from drafters.tables.kernel import allocating_kernel
from verify.model.cpu.packing import padded_count

GROUP = 32  # inputs that share a scale and the value of 8
STEP_ROWS = MAX_NODES + 16  # of a step, or of a few more; unpacking would not pay for fewer
UNPACKED_VALUES = 1 << 21  # unpacked at once; they stay in the CPU's caches
WIDTHS = (64, 32)  # outputs that are packed together: with AVX-512, and with AVX2


@torch.library.custom_op("outrider::multiply_unpacked", mutates_args=())
def multiply_unpacked(rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, in_features] to [N, out_features], bfloat16, from tensors as `_weight_int4pack_mm_for_cpu` takes them.

    Scriptable. Where the layout of `packed` is unknown, that kernel computes the product.
    """
    width = packed_width()
    outputs, inputs = packed.size(0), rows.size(1)
    if width is None or outputs % width:
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, GROUP, scales)
        return product
    count = len(rows)
    padded = torch.nn.functional.pad(rows, [0, 0, 0, padded_count(count) - count])
    result = rows.new_empty(len(padded), outputs)
    step = max(1, UNPACKED_VALUES // (inputs * width)) * width
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        result[:, first:last] = padded @ unpack(packed, scales, first, last, width)
    return result[:count]


def unpack(packed: torch.Tensor, scales: torch.Tensor, first: int, last: int, width: int) -> torch.Tensor:
    """The weights of the outputs from `first` to `last`, whole widths, bfloat16 [in_features, last - first]."""
    inputs = scales.size(0) * GROUP
    weights = torch.empty(inputs, last - first, dtype=torch.bfloat16)
    _unpacker(width)(
        packed.view(-1, inputs, width // 2)[first // width : last // width].numpy(),
        scales.view(torch.int32)[..., 0].numpy().view(np.uint32),
        first,
        weights.view(torch.int16).numpy().view(np.uint16),
    )
    return weights


@cache
def _unpacker(width: int) -> Callable[..., None]:
    """The compiled loop for a width, which is a constant in it: otherwise, LLVM vectorises it badly."""
    half = width // 2

    @allocating_kernel
    def write(packed, scales, first, weights):  # type: ignore[no-untyped-def]
        """Writes uint16 [inputs, outputs], as rounded sums of float32.

        `packed` is uint8 [blocks, inputs, half]; a byte holds two outputs, `half` apart. `scales` are pairs of bfloat16,
        [groups, outputs]; those of the first block begin at `first`.
        """
        value, scale, centre = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        value_bits, scale_bits, centre_bits = value.view(np.uint32), scale.view(np.uint32), centre.view(np.uint32)
        for block in range(packed.shape[0]):
            column = block * width
            for group in range(packed.shape[1] // GROUP):
                for output in range(width):
                    pair = scales[group, first + column + output]
                    scale_bits[output] = pair << np.uint32(16)
                    centre_bits[output] = pair & np.uint32(0xFFFF0000)
                for row in range(group * GROUP, group * GROUP + GROUP):
                    for low in range(half):
                        byte, high = packed[block, row, low], low + half
                        value[low] = np.float32(np.int32(byte & 15) - 8) * scale[low] + centre[low]
                        value[high] = np.float32(np.int32(byte >> 4) - 8) * scale[high] + centre[high]
                    for output in range(width):
                        bits = value_bits[output]
                        even = (bits >> np.uint32(16)) & np.uint32(1)
                        weights[row, column + output] = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

    return cast("Callable[..., None]", write)


@cache
def packed_width() -> int | None:
    """The outputs that this CPU's kernel packs together; None if its layout is unknown."""
    outputs, inputs = 2 * max(WIDTHS), 2 * GROUP
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32, generator=generator)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    scales = torch.randn(inputs // GROUP, outputs, 2, generator=generator).bfloat16()
    weights = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(inputs, dtype=torch.bfloat16), packed, GROUP, scales)
    return next((width for width in WIDTHS if torch.equal(unpack(packed, scales, 0, outputs, width), weights)), None)
