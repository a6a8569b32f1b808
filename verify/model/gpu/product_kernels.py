"""A Triton kernel of linear layers for few rows, in which a row gets the same bits in any number of rows.

The weights are the left matrix of the product, and a forward's rows are the columns of the right one, N of an instruction's
M x N x K. With more rows, instructions have a larger N, but all have the same K and follow each other in the same order, and N
does not change how a tensor core sums an element. NVIDIA promises none of this; the H200 was found to do so, and starts check
it (`outrider.verify.model.invariance`). A tile may have few rows, because reading the weights takes most of the time.

Weights of 8 and 4 bits become numbers of the rows' type in registers, so their outputs are those of a layer with these weights.
Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.precision import PRECISION

# The inputs that share a scale, as `outrider.verify.model.gpu.quantized.BLOCK`.
BLOCK = tl.constexpr(32)


@triton.jit
def _weights(
    of_weight, stored, part, scales, minimums, output, first, outputs, inputs: tl.constexpr, dtype: tl.constexpr,
    bits: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """The weights of the inputs from `first` on, [block_outputs, block_inputs] of `dtype`.

    With 4 bits, they are in this `part` of the bytes that are `stored`.
    """
    at = first + tl.arange(0, block_inputs)
    mask = (output < outputs)[:, None] & (at < inputs)[None, :]
    values = (stored >> (4 * part)) & 15 if bits == 4 else tl.load(of_weight + at[None, :], mask, 0)
    if bits == 16:
        return values
    else:
        count: tl.constexpr = block_inputs // BLOCK
        blocks: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
        block = first // BLOCK + tl.arange(0, count)
        place = output.to(tl.int64)[:, None] * blocks + block[None, :]
        of_block = (output < outputs)[:, None] & (block < blocks)[None, :]
        factors = tl.load(scales + place, of_block, 0.0).to(tl.float32)
        weights = tl.reshape(values.to(tl.float32), [block_outputs, count, BLOCK]) * factors[:, :, None]
        if bits == 4:
            weights += tl.load(minimums + place, of_block, 0.0).to(tl.float32)[:, :, None]
        return tl.reshape(weights, [block_outputs, block_inputs]).to(dtype)


@triton.jit
def _add_product(found, weights, rows, row, first, count, row_stride, inputs: tl.constexpr, block_inputs: tl.constexpr):
    """Adds the products of weights with the rows' inputs from `first` on, float32 [outputs, rows]."""
    at = first + tl.arange(0, block_inputs)
    block = tl.load(rows + row[:, None] * row_stride + at[None, :], (row < count)[:, None] & (at < inputs)[None, :], 0.0)
    return tl.dot(weights, tl.trans(block), found, input_precision=PRECISION)


@triton.jit
def _store(target, values, row, output, count, outputs):
    """Stores a block, [rows, outputs], of a contiguous matrix [count, outputs]."""
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(target + place, values.to(target.dtype.element_ty), (row < count)[:, None] & (output < outputs)[None, :])


@triton.jit
def _finish(
    found, bias, out, partial, row, output, count, outputs,
    has_bias: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """Stores a block of outputs, float32 [rows, outputs]; the last of several splits adds the parts of all, in their order."""
    if splits > 1:
        place = row.to(tl.int64)[:, None] * outputs + output[None, :]
        mask = (row < count)[:, None] & (output < outputs)[None, :]
        found = tl.zeros_like(found)
        for split in range(splits):
            # Other multiprocessors wrote the parts, so they are read from the cache that all share.
            found += tl.load(partial + split * count * outputs + place, mask, 0.0, cache_modifier=".cg")
    if has_bias:
        found += tl.load(bias + output, output < outputs, 0.0).to(tl.float32)[None, :]
    _store(out, found, row, output, count, outputs)


@triton.jit
def _is_last(arrived, splits: tl.constexpr):
    """Whether all other splits of this program's tile have stored their parts, as it has; if so, the counter is zero again."""
    tile = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.debug_barrier()  # all threads have stored the part before one of them says so
    is_last = tl.atomic_add(tile, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.atomic_xchg(tile, 0)
    return is_last


@triton.jit(do_not_specialize=["count"])
def multiply(
    rows,  # [N, inputs]
    row_stride,
    weight,  # [outputs, inputs]; int8 with 8 bits; uint8 [outputs, inputs / 2, up to whole blocks] with 4
    scales,  # [outputs, inputs / BLOCK]; unused with 16 bits
    minimums,  # the same; used with 4 bits
    bias,  # [outputs]; unused without has_bias
    out,  # [N, outputs], contiguous
    partial,  # float32 [splits, N, outputs]; unused with one split
    arrived,  # int32, zeros, one for each tile of `out`; zeros again afterwards. Unused with one split
    count,  # N
    outputs,
    inputs: tl.constexpr,
    bits: tl.constexpr,  # 16, 8, or 4: the lower halves of a block's bytes are the first half of its inputs
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    more_rows: tl.constexpr,  # of a second block, so that slightly more rows than a power of two cost little; 0 = none
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    splits: tl.constexpr,  # of the inputs; a program computes one of them for a tile of `out`
    split_inputs: tl.constexpr,  # inputs of a split, whole blocks
):
    """A tile of `out`, or its part from a split of the inputs."""
    split = tl.program_id(2)
    first = tl.program_id(1) * (block_rows + more_rows)
    row, more = first + tl.arange(0, block_rows), first + block_rows + tl.arange(0, max(1, more_rows))
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    found = tl.zeros([block_outputs, block_rows], tl.float32)
    found_more = tl.zeros([block_outputs, max(1, more_rows)], tl.float32)
    dtype: tl.constexpr = rows.dtype.element_ty
    parts: tl.constexpr = 2 if bits == 4 else 1  # of a block of inputs, which are multiplied one after the other
    part_inputs: tl.constexpr = block_inputs // parts
    row_bytes: tl.constexpr = (inputs + block_inputs - 1) // block_inputs * part_inputs
    of_weight = weight + output.to(tl.int64)[:, None] * (row_bytes if bits == 4 else inputs)
    for begin in range(split * split_inputs, tl.minimum((split + 1) * split_inputs, inputs), block_inputs):
        place = of_weight + begin // parts + tl.arange(0, part_inputs)[None, :]
        stored = tl.load(place, (output < outputs)[:, None], 0) if bits == 4 else 0
        for part in tl.static_range(parts):
            at = begin + part * part_inputs
            weights = _weights(
                of_weight, stored, part, scales, minimums, output, at, outputs, inputs, dtype, bits, block_outputs, part_inputs
            )
            found = _add_product(found, weights, rows, row, at, count, row_stride, inputs, part_inputs)
            if more_rows:
                found_more = _add_product(found_more, weights, rows, more, at, count, row_stride, inputs, part_inputs)
    is_last = True
    if splits > 1:
        _store(partial + split * count * outputs, tl.trans(found), row, output, count, outputs)
        if more_rows:
            _store(partial + split * count * outputs, tl.trans(found_more), more, output, count, outputs)
        is_last = _is_last(arrived, splits)
    if is_last:
        _finish(tl.trans(found), bias, out, partial, row, output, count, outputs, has_bias, splits)
        if more_rows:
            _finish(tl.trans(found_more), bias, out, partial, more, output, count, outputs, has_bias, splits)
