"""A Triton kernel of linear layers for few rows, in which a row gets the same bits in any number of rows.

The weights take the place of a product's rows, and the rows that of its columns. So whatever the number of rows is, the same
instructions sum the inputs in the same order, and tiles that are as small as the rows cost nothing: reading the weights takes
the time. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    weight,  # [outputs, inputs], contiguous
    bias,  # [outputs]; unused without has_bias
    out,  # [N, outputs], contiguous
    partial,  # float32 [splits, N, outputs]; unused with one split
    arrived,  # int32, zeros, one for each tile of `out`; zeros again afterwards. Unused with one split
    count,  # N
    outputs,
    inputs: tl.constexpr,
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
    of_weight = weight + output.to(tl.int64)[:, None] * inputs
    for begin in range(split * split_inputs, tl.minimum((split + 1) * split_inputs, inputs), block_inputs):
        at = begin + tl.arange(0, block_inputs)
        inside = at < inputs
        weights = tl.load(of_weight + at[None, :], (output < outputs)[:, None] & inside[None, :], 0.0)
        found = tl.dot(weights, tl.trans(_load_rows(rows, row, at, count, row_stride, inside)), found)
        if more_rows:
            found_more = tl.dot(weights, tl.trans(_load_rows(rows, more, at, count, row_stride, inside)), found_more)
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
