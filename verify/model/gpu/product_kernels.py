"""A Triton kernel of linear layers for few rows, in which a row gets the same bits in any number of rows.

The weights take the place of a product's rows, and the rows that of its columns. So whatever the number of rows is, the same
instructions sum the inputs in the same order, and tiles that are as small as the rows cost nothing: reading the weights takes
the time.

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
def _scaled(
    values, scales, minimums, output, first, outputs, inputs: tl.constexpr, dtype: tl.constexpr,
    has_minimums: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """Weights, [block_outputs, block_inputs] of `dtype`, from whole numbers and their blocks' scales; 0 beyond `inputs`."""
    count: tl.constexpr = block_inputs // BLOCK
    blocks: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    block = first // BLOCK + tl.arange(0, count)
    place = output.to(tl.int64)[:, None] * blocks + block[None, :]
    mask = (output < outputs)[:, None] & (block < blocks)[None, :]
    factors = tl.load(scales + place, mask, 0.0).to(tl.float32)
    weights = tl.reshape(values.to(tl.float32), [block_outputs, count, BLOCK]) * factors[:, :, None]
    if has_minimums:
        weights += tl.load(minimums + place, mask, 0.0).to(tl.float32)[:, :, None]
    return tl.reshape(weights, [block_outputs, block_inputs]).to(dtype)


@triton.jit
def _load_rows(rows, row, inputs, count, row_stride, of_inputs):
    """A block of rows, [rows, inputs]; zero beyond `count`."""
    return tl.load(rows + row[:, None] * row_stride + inputs[None, :], (row < count)[:, None] & of_inputs[None, :], 0.0)


@triton.jit
def _finish(
    found, bias, out, partial, row, output, count, outputs,
    has_bias: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """Stores a block of outputs, float32 [rows, outputs]; the last of several splits adds the parts of all, in their order."""
    mask = (row < count)[:, None] & (output < outputs)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if splits > 1:
        found = tl.zeros_like(found)
        for split in range(splits):
            # Other multiprocessors wrote the parts, so they are read from the cache that all share.
            found += tl.load(partial + split * count * outputs + place, mask, 0.0, cache_modifier=".cg")
    if has_bias:
        found += tl.load(bias + output, output < outputs, 0.0).to(tl.float32)[None, :]
    tl.store(out + place, found.to(out.dtype.element_ty), mask)


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
    real = (output < outputs)[:, None]
    dtype: tl.constexpr = rows.dtype.element_ty
    parts: tl.constexpr = 2 if bits == 4 else 1  # of a block of inputs, which are multiplied one after the other
    part_inputs: tl.constexpr = block_inputs // parts
    row_bytes: tl.constexpr = (inputs + block_inputs - 1) // block_inputs * part_inputs
    of_weight = weight + output.to(tl.int64)[:, None] * (row_bytes if bits == 4 else inputs)
    for begin in range(split * split_inputs, tl.minimum((split + 1) * split_inputs, inputs), block_inputs):
        if bits == 4:
            stored = tl.load(of_weight + begin // parts + tl.arange(0, part_inputs)[None, :], real, 0)
        for part in tl.static_range(parts):
            at = begin + part * part_inputs + tl.arange(0, part_inputs)
            inside = at < inputs
            if bits == 16:
                weights = tl.load(of_weight + at[None, :], real & inside[None, :], 0.0)
            else:
                values = (
                    (stored >> (4 * part)) & 15 if bits == 4 else tl.load(of_weight + at[None, :], real & inside[None, :], 0)
                )
                weights = _scaled(
                    values, scales, minimums, output, begin + part * part_inputs, outputs, inputs, dtype,
                    bits == 4, block_outputs, part_inputs,
                )  # fmt: skip
            block = tl.trans(_load_rows(rows, row, at, count, row_stride, inside))
            found = tl.dot(weights, block, found, input_precision=PRECISION)
            if more_rows:
                block = tl.trans(_load_rows(rows, more, at, count, row_stride, inside))
                found_more = tl.dot(weights, block, found_more, input_precision=PRECISION)
    is_last = True
    if splits > 1:
        part = partial + split * count * outputs
        mask = (output < outputs)[None, :]
        tl.store(part + row.to(tl.int64)[:, None] * outputs + output[None, :], tl.trans(found), (row < count)[:, None] & mask)
        if more_rows:
            place = more.to(tl.int64)[:, None] * outputs + output[None, :]
            tl.store(part + place, tl.trans(found_more), (more < count)[:, None] & mask)
        tile = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have stored the part before one of them says so
        is_last = tl.atomic_add(tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.atomic_xchg(tile, 0)
    if is_last:
        _finish(tl.trans(found), bias, out, partial, row, output, count, outputs, has_bias, splits)
        if more_rows:
            _finish(tl.trans(found_more), bias, out, partial, more, output, count, outputs, has_bias, splits)
