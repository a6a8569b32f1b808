"""How Triton kernels read the weights of layers: of 16 bits as they are, of 8 and 4 bits as numbers of the rows' type.

Weights of fewer bits become numbers in registers, so outputs are those of a layer with these weights. Triton is an optional
dependency: import this module lazily.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# As in `outrider.verify.model.gpu.forms`: the inputs whose values lie in the same words, and those of a factor.
GROUP, SPAN = tl.constexpr(128), tl.constexpr(256)
# What float32 numbers of a weight's 8 or 4 bits are above: 2 ** 15 + 128, and 2 ** 7. Of 4 bits without minimums, 8 is zero.
BASES, MIDDLE = tl.constexpr({8: 32896.0, 4: 128.0}), tl.constexpr(8.0)
# Whether kernels may have instructions of NVIDIA's GPUs: not in Triton's interpreter, and not on AMD's.
HAS_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def load_block(
    weight, scales, minimums, factors, output, outputs, begin,
    inputs: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """The weights of the inputs from `begin` on as they are stored, and their units and minimums, float32, for `part_weights`.

    `weight` and the planes after it are as in `multiply`, and `output` has the numbers of the outputs. With 8 or 4 bits,
    `block_inputs` is GROUP, and `begin` is a multiple of it.
    """
    line = tl.minimum(output, outputs - 1)[:, None]  # a mask would cost registers; nobody stores what is beyond
    if bits == 16:
        at = begin + tl.arange(0, block_inputs)[None, :]
        return tl.load(weight + line.to(tl.int64) * inputs + at, at < inputs, 0), 0, 0
    else:
        words: tl.constexpr = GROUP * bits // 16
        groups: tl.constexpr = (inputs + GROUP - 1) // GROUP
        stored = tl.load(weight + (line.to(tl.int64) * groups + begin // GROUP) * words + tl.arange(0, words)[None, :])
        place = (line * groups + begin // GROUP) * (GROUP // group) + tl.arange(0, GROUP // group)[None, :]
        whole: tl.constexpr = scales.dtype.element_ty == tl.int8
        units, least = tl.load(scales + place).to(tl.float32), 0.0
        if minimums is not None:
            least = tl.load(minimums + place).to(tl.float32)
        if factors is not None:
            of_span = 2 * (line * ((inputs + SPAN - 1) // SPAN) + begin // SPAN if whole else line)
            units *= tl.load(factors + of_span).to(tl.float32)
        if minimums is not None:
            if minimums.dtype.element_ty == tl.int8 and not whole:
                least *= units
            elif factors is not None:
                least *= tl.load(factors + of_span + 1).to(tl.float32)
        return stored, units, least


@triton.jit
def part_weights(
    stored, units, least, scales, minimums, part: tl.constexpr, bits: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """The weights, [block_outputs, inputs / parts] of `dtype`, of one of the parts of the inputs that `load_block` loaded.

    There are 16 / bits parts. Words of 16 bits have a weight of each, the first one in their lowest bits.
    """
    if bits == 16:
        return stored
    else:
        units = _of_part(units, part, bits)  # [block_outputs, scales of the part]
        values = tl.reshape(_values(stored, part, bits), [stored.shape[0], units.shape[1], stored.shape[1] // units.shape[1]])
        factor = units[:, :, None]
        if scales.dtype.element_ty == tl.bfloat16:
            weights = _of_float4(values - BASES[bits]) * factor
        elif bits == 8 and minimums is None and HAS_PTX:  # rounded once, so the product is that of the value and the scale
            offset = tl.broadcast_to(-BASES[bits] * factor, values.shape)
            weights = tl.fma(values, tl.broadcast_to(factor, values.shape), offset)
        elif bits == 8 and minimums is None:
            weights = (values - BASES[bits]) * factor
        elif bits == 8:
            weights = (values - BASES[bits]) * factor + _of_part(least, part, bits)[:, :, None]
        elif minimums is None:
            weights = values * factor - (BASES[bits] + MIDDLE) * factor
        else:
            weights = values * factor + (_of_part(least, part, bits) - BASES[bits] * units)[:, :, None]
        return tl.reshape(weights, stored.shape).to(dtype)


@triton.jit
def _of_part(of_blocks, part: tl.constexpr, bits: tl.constexpr):
    """The columns of a part, of those of a group's blocks."""
    if bits == 8:
        return _half(of_blocks, part)
    else:
        return _half(_half(of_blocks, part // 2), part % 2)


@triton.jit
def _half(of_blocks, part: tl.constexpr):
    """The first or last half of the columns."""
    halves = tl.reshape(of_blocks, [of_blocks.shape[0], 2, of_blocks.shape[1] // 2])
    first, last = tl.split(tl.permute(halves, (0, 2, 1)))
    return last if part else first


@triton.jit
def _of_float4(codes):
    """Twice the floats of 4 bits (e2m1) that have these codes: 0, 1, 2, 3, 4, 6, 8, 12, and the same below zero."""
    size = tl.where(codes < 8.0, codes, codes - 8.0)
    size = size + tl.maximum(size - 4.0, 0.0) + 2.0 * tl.maximum(size - 6.0, 0.0)
    return tl.where(codes < 8.0, size, -size)


@triton.jit
def _values(stored, part: tl.constexpr, bits: tl.constexpr):
    """A part's values above BASES, float32. Bytes become bits of mantissas, which is faster than a conversion of integers."""
    if not HAS_PTX:
        values = (stored.to(tl.int32) >> part * bits) & (255 if bits == 8 else 15)
        return values.to(tl.float32) + (BASES[bits] - 128.0 if bits == 8 else BASES[bits])
    elif bits == 8 and part == 0:
        return _inline(stored, "mov.b32 a, $2; mov.b32 c, 0x47000000;", "0x7404", "0x7424")
    elif bits == 8:
        return _inline(stored, "mov.b32 a, $2; mov.b32 c, 0x47000000;", "0x7414", "0x7434")
    elif part == 0:
        return _inline(stored, "and.b32 a, $2, 0x0F0F0F0F; mov.b32 c, 0x43000000;", "0x7044", "0x7244")
    elif part == 1:
        return _inline(stored, "shr.u32 a, $2, 4; and.b32 a, a, 0x0F0F0F0F; mov.b32 c, 0x43000000;", "0x7044", "0x7244")
    elif part == 2:
        return _inline(stored, "and.b32 a, $2, 0x0F0F0F0F; mov.b32 c, 0x43000000;", "0x7144", "0x7344")
    else:
        return _inline(stored, "shr.u32 a, $2, 4; and.b32 a, a, 0x0F0F0F0F; mov.b32 c, 0x43000000;", "0x7144", "0x7344")


@triton.jit
def _inline(stored, load: tl.constexpr, first: tl.constexpr, second: tl.constexpr):
    """Two words' values by instructions of PTX: `load` sets `a` and `c`, whose bytes the selectors put together."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, c; " + load + " prmt.b32 $0, a, c, " + first + "; prmt.b32 $1, a, c, " + second + "; }",
        "=r,=r,r", [stored], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip
