"""How Triton kernels read the weights of layers: of 16 bits as they are, of 8 and 4 bits as numbers of the rows' type.

Weights of fewer bits become numbers in registers, so outputs are those of a layer with these weights. Triton is an optional
dependency: import this module lazily.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# As in `outrider.verify.model.gpu.quantized`: the inputs that share a scale, and those whose weights lie in the same words.
BLOCK, GROUP = tl.constexpr(32), tl.constexpr(128)
# What float32 numbers of a weight's 8 or 4 bits are above: 2 ** 15 + 128, and 2 ** 7.
BASES = tl.constexpr({8: 32896.0, 4: 128.0})
# Whether kernels may have instructions of NVIDIA's GPUs: not in Triton's interpreter, and not on AMD's.
HAS_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def load_block(
    weight, scales, minimums, output, outputs, begin, inputs: tl.constexpr, bits: tl.constexpr, block_inputs: tl.constexpr
):
    """The weights of the inputs from `begin` on as they are stored, and their factors and offsets for `part_weights`.

    `weight`, `scales` and `minimums` are as in `multiply`, and `output` has the numbers of the outputs. With 8 or 4 bits,
    `block_inputs` is GROUP, and `begin` is a multiple of it.
    """
    line, real = output.to(tl.int64)[:, None], (output < outputs)[:, None]
    if bits == 16:
        at = begin + tl.arange(0, block_inputs)[None, :]
        return tl.load(weight + line * inputs + at, real & (at < inputs), 0), 0, 0
    else:
        words: tl.constexpr = GROUP * bits // 16
        line = line * ((inputs + GROUP - 1) // GROUP) + begin // GROUP
        place = line * (GROUP // BLOCK) + tl.arange(0, GROUP // BLOCK)[None, :]
        stored = tl.load(weight + line * words + tl.arange(0, words)[None, :], real, 0)
        factors = tl.load(scales + place, real, 0.0).to(tl.float32)
        offsets = -BASES[bits] * factors
        if bits == 4:
            offsets += tl.load(minimums + place, real, 0.0).to(tl.float32)
        return stored, factors, offsets


@triton.jit
def part_weights(stored, factors, offsets, part: tl.constexpr, bits: tl.constexpr, dtype: tl.constexpr):
    """The weights, [block_outputs, inputs / parts] of `dtype`, of one of the parts of the inputs that `load_block` loaded.

    There are 16 / bits parts. Words of 16 bits have a weight of each, the first one in their lowest bits.
    """
    if bits == 16:
        return stored
    elif bits == 8:
        factors, offsets = _half(factors, part), _half(offsets, part)  # [block_outputs, 2]
        values = tl.reshape(_values(stored, part, bits), [stored.shape[0], GROUP // BLOCK // 2, BLOCK])
        if HAS_PTX:  # rounded once, so the product is that of the value and the scale
            factors = tl.broadcast_to(factors[:, :, None], values.shape)
            weights = tl.fma(values, factors, tl.broadcast_to(offsets[:, :, None], values.shape))
        else:
            weights = (values - BASES[bits]) * factors[:, :, None]
        return tl.reshape(weights, stored.shape).to(dtype)
    else:
        factors, offsets = _quarter(factors, part), _quarter(offsets, part)  # [block_outputs]
        return (_values(stored, part, bits) * factors[:, None] + offsets[:, None]).to(dtype)


@triton.jit
def _half(of_blocks, part: tl.constexpr):
    """The first or last two of four columns."""
    first, last = tl.split(tl.permute(tl.reshape(of_blocks, [of_blocks.shape[0], 2, 2]), (0, 2, 1)))
    return last if part else first


@triton.jit
def _quarter(of_blocks, part: tl.constexpr):
    """One of four columns."""
    first, second = tl.split(_half(of_blocks, part // 2))
    return second if part % 2 else first


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
