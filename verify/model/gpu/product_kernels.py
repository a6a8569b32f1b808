"""A Triton kernel of linear layers for few rows, in which a row gets the same bits in any number of rows.

The weights are the left matrix of the product, and a forward's rows are the columns of the right one, N of an instruction's
M x N x K. With more rows, instructions have a larger N, but all have the same K and follow each other in the same order, and N
does not change how a tensor core sums an element. NVIDIA promises none of this; the H200 was found to do so, and starts check
it (`outrider.verify.model.invariance`). A tile may have few rows, because reading the weights takes most of the time.

Weights of 8 and 4 bits become numbers of the rows' type in registers, so their outputs are those of a layer with these weights.
Kernels of other layers may unpack them, too, by `load_block` and `part_weights`.
Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

# How matrices of float32 are multiplied: three products of TF32 are as good as one, and Triton has them for NVIDIA's GPUs only.
PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
# As in `outrider.verify.model.gpu.quantized`: the inputs that share a scale, and those whose weights lie in the same words.
BLOCK, GROUP = tl.constexpr(32), tl.constexpr(128)
# What float32 numbers of a weight's 8 or 4 bits are above: 2 ** 15 + 128, and 2 ** 7.
BASES = tl.constexpr({8: 32896.0, 4: 128.0})
# Whether kernels may have instructions of NVIDIA's GPUs: not in Triton's interpreter, and not on AMD's.
HAS_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
# What becomes of outputs: pairs of a gate and a value become one number, or outputs are added to the residual.
PLAIN, SWIGLU, RESIDUAL = map(tl.constexpr, range(3))
# The columns of a part of a row's sum of squares.
SUMMED, SUMMED_LEVELS = tl.constexpr(64), tl.constexpr(6)
FEW_ROWS = tl.constexpr(64)
# A line of a GPU's caches.
LINE_BYTES = tl.constexpr(128)


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


@triton.jit
def add_product(found, weights, rows, row, first, count, row_stride, inputs: tl.constexpr, block_inputs: tl.constexpr):
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
def folded(values, times: tl.constexpr):
    """Adds neighbours in pairs, `times` times: [rows, columns] to [rows, columns / 2^times].

    The order of a sum does not depend on where a program's threads have the numbers, as that of `tl.sum` does.
    """
    for _ in tl.static_range(times):
        left, right = tl.split(tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]))
        values = left + right
    return values


@triton.jit
def sums_of_rows(sums, row, count, columns: tl.constexpr, padded: tl.constexpr):
    """The parts of the rows' sums of squares, [rows, padded], of which there are `columns`."""
    column = tl.arange(0, padded)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    return tl.load(sums + place, (row < count)[:, None] & (column < columns)[None, :], 0.0)


@triton.jit
def _normed(found, parts, inputs: tl.constexpr, epsilon, levels: tl.constexpr):
    """Outputs of rows, [rows, outputs], that were multiplied before they were divided by their root mean squares."""
    total = tl.reshape(folded(parts, levels), [parts.shape[0]])
    return found * tl.rsqrt(total / inputs + epsilon)[:, None]


@triton.jit
def store_state(state, gain, target, gained, sums, row, output, count, outputs):
    """Stores rows of the residual, [rows, outputs]; the same times the next norm's gain; and parts of the sums of squares.

    A part is of SUMMED columns, whatever the size of a tile is.
    """
    _store(target, state, row, output, count, outputs)
    exact = state.to(tl.float32)
    factor = tl.load(gain + output, output < outputs, 0.0).to(tl.float32)
    _store(gained, exact * factor[None, :], row, output, count, outputs)
    # Squares of numbers of 16 bits are exact, so that it makes no difference whether one is added by the same instruction.
    part = tl.program_id(0) * (state.shape[1] // SUMMED) + tl.arange(0, state.shape[1] // SUMMED)
    _store(sums, folded(exact * exact, SUMMED_LEVELS), row, part, count, outputs // SUMMED)


@triton.jit
def _finish(
    found, bias, out, partial, parts, epsilon, residual, gain, gained, next_sums, row, output, count, outputs,
    inputs: tl.constexpr, has_bias: tl.constexpr, splits: tl.constexpr, levels: tl.constexpr, epilogue: tl.constexpr,
):  # fmt: skip
    """Stores a block of outputs, float32 [rows, outputs]; the last of several splits adds the parts of all, in their order."""
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    mask = (row < count)[:, None] & (output < outputs)[None, :]
    if splits > 1:
        found = tl.zeros_like(found)
        for split in range(splits):
            # Other multiprocessors wrote the parts, so they are read from the cache that all share.
            found += tl.load(partial + split * count * outputs + place, mask, 0.0, cache_modifier=".cg")
    if levels >= 0:
        found = _normed(found, parts, inputs, epsilon, levels)
    if has_bias:
        found += tl.load(bias + output, output < outputs, 0.0).to(tl.float32)[None, :]
    if epilogue == SWIGLU:
        gate, up = tl.split(tl.reshape(found, [found.shape[0], found.shape[1] // 2, 2]))
        half = tl.program_id(0) * (found.shape[1] // 2) + tl.arange(0, found.shape[1] // 2)
        _store(out, gate / (1.0 + tl.exp(-gate)) * up, row, half, count, outputs // 2)
    elif epilogue == RESIDUAL:
        state = (found + tl.load(residual + place, mask, 0.0).to(tl.float32)).to(out.dtype.element_ty)
        store_state(state, gain, out, gained, next_sums, row, output, count, outputs)
    else:
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


@triton.jit
def enter(pdl: tl.constexpr):
    """Lets the next kernel start, and waits until the one before has ended, if kernels overlap.

    Before, nothing may be touched that another kernel reads or writes: a graph's memory is used again. Weights may be read.
    """
    if pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def _fetch(weight, output, outputs, start, inputs: tl.constexpr, bits: tl.constexpr, lines: tl.constexpr):
    """Brings `lines` lines of each output's weights, from input `start` on, to the cache that multiprocessors share."""
    numbers: tl.constexpr = inputs if bits == 16 else (inputs + GROUP - 1) // GROUP * (GROUP * bits // 16)  # of 16 bits
    number = tl.minimum(start * bits // 16 + tl.arange(0, lines) * (LINE_BYTES // 2), numbers - 1)
    line = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * numbers + number[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["count"])
def multiply(
    rows,  # [N, inputs]
    row_stride,
    weight,  # [outputs, inputs]; with 8 and 4 bits the words of `outrider.verify.model.gpu.quantized.Blocks`
    scales,  # [outputs, blocks up to whole groups]; unused with 16 bits
    minimums,  # the same; used with 4 bits
    bias,  # [outputs]; unused without has_bias
    sums,  # float32 [N, inputs / SUMMED], parts of the sums of squares of rows that are not normed yet; unused without levels
    epsilon,  # of that norm
    residual,  # [N, outputs]; this and the next four are used by the epilogue of that name
    gain,  # [outputs], of the norm that follows
    gained,  # [N, outputs]: the new residual times `gain`
    next_sums,  # float32 [N, outputs / SUMMED], of the new residual
    out,  # [N, outputs], contiguous; with SWIGLU [N, outputs / 2]; with RESIDUAL the new residual
    partial,  # float32 [splits, N, outputs]; unused with one split
    arrived,  # int32, zeros, one for each tile of `out`; zeros again afterwards. Unused with one split
    count,  # N
    outputs,
    inputs: tl.constexpr,
    bits: tl.constexpr,  # 16, 8, or 4
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    more_rows: tl.constexpr,  # of a second block, so that slightly more rows than a power of two cost little; 0 = none
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,  # GROUP with 8 and 4 bits
    splits: tl.constexpr,  # of the inputs; a program computes one of them for a tile of `out`
    split_inputs: tl.constexpr,  # inputs of a split, whole blocks
    levels: tl.constexpr,  # the binary logarithm of the parts of a sum of squares, rounded up; -1 = normed rows
    epilogue: tl.constexpr,
    pdl: tl.constexpr,  # see `enter`
    ahead: tl.constexpr,  # lines of each output's weights that are fetched while the kernel before still runs
):
    """A tile of `out`, or its part from a split of the inputs."""
    split = tl.program_id(2)
    first_row = tl.program_id(1) * (block_rows + more_rows)
    row, more = first_row + tl.arange(0, block_rows), first_row + block_rows + tl.arange(0, max(1, more_rows))
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    found = tl.zeros([block_outputs, block_rows], tl.float32)
    found_more = tl.zeros([block_outputs, max(1, more_rows)], tl.float32)
    dtype: tl.constexpr = rows.dtype.element_ty
    parts: tl.constexpr = 16 // bits  # of a block of inputs, which are multiplied one after the other
    part_inputs: tl.constexpr = block_inputs // parts
    start = split * split_inputs
    if ahead:
        _fetch(weight, output, outputs, start, inputs, bits, ahead)
    enter(pdl)
    squares, more_squares = 0.0, 0.0
    if levels >= 0:
        columns: tl.constexpr = inputs // SUMMED
        if block_rows <= FEW_ROWS:  # read while the products are computed; those of more rows would take too many registers
            squares = sums_of_rows(sums, row, count, columns, 1 << levels)
        if more_rows:
            more_squares = sums_of_rows(sums, more, count, columns, 1 << levels)
    # A constant number of blocks lets the compiler keep products in flight.
    size = split_inputs if splits * split_inputs == inputs else tl.minimum(split_inputs, inputs - start)
    for done in range(0, size, block_inputs):
        first = start + done
        stored, factors, offsets = load_block(weight, scales, minimums, output, outputs, first, inputs, bits, block_inputs)
        for part in tl.static_range(parts):
            at = first + part * part_inputs
            weights = part_weights(stored, factors, offsets, part, bits, dtype)
            found = add_product(found, weights, rows, row, at, count, row_stride, inputs, part_inputs)
            if more_rows:
                found_more = add_product(found_more, weights, rows, more, at, count, row_stride, inputs, part_inputs)
    if levels >= 0 and block_rows > FEW_ROWS:
        squares = sums_of_rows(sums, row, count, inputs // SUMMED, 1 << levels)
    is_last = True
    if splits > 1:
        _store(partial + split * count * outputs, tl.trans(found), row, output, count, outputs)
        if more_rows:
            _store(partial + split * count * outputs, tl.trans(found_more), more, output, count, outputs)
        is_last = _is_last(arrived, splits)
    if is_last:
        _finish(
            tl.trans(found), bias, out, partial, squares, epsilon, residual, gain, gained, next_sums, row, output, count,
            outputs, inputs, has_bias, splits, levels, epilogue,
        )  # fmt: skip
        if more_rows:
            _finish(
                tl.trans(found_more), bias, out, partial, more_squares, epsilon, residual, gain, gained, next_sums, more,
                output, count, outputs, inputs, has_bias, splits, levels, epilogue,
            )  # fmt: skip


@triton.jit
def embed(tokens, table, gain, out, gained, sums, count, width, block: tl.constexpr, pdl: tl.constexpr):
    """A part of a token's row of the embedding table, [tokens, width], as `store_state` stores it."""
    enter(pdl)
    row = tl.program_id(1) + tl.arange(0, 1)
    column = tl.program_id(0) * block + tl.arange(0, block)
    token = tl.load(tokens + row)
    state = tl.load(table + token[:, None] * width + column[None, :], (column < width)[None, :], 0.0)
    store_state(state, gain, out, gained, sums, row, column, count, width)
