"""A Triton kernel of linear layers for few rows, in which a row gets the same bits in any number of rows.

The weights are the left matrix of the product, and a forward's rows are the columns of the right one, N of an instruction's
M x N x K. With more rows, instructions have a larger N, but all have the same K and follow each other in the same order, and N
does not change how a tensor core sums an element. NVIDIA promises none of this; the H200 was found to do so, and starts check
it (`outrider.verify.model.invariance`). A tile may have few rows, because reading the weights takes most of the time.
Kernels of other layers may use `products`, too. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from outrider.verify.model.gpu.exchange_kernels import await_all, epoch_of, parts_of, publish
from outrider.verify.model.gpu.weight_kernels import GROUP, load_block, part_weights

# How matrices of float32 are multiplied: three products of TF32 are as good as one, and Triton has them for NVIDIA's GPUs only.
PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
# What becomes of outputs: pairs of a gate and a value become one number, or outputs are added to the residual; or they are
# parts of sums that all ranks get, or a rank's part of the logits, which the first one gets (`exchange_kernels`).
PLAIN, SWIGLU, RESIDUAL, PARTS, LOGITS = map(tl.constexpr, range(5))
# The columns of a part of a row's sum of squares.
SUMMED, SUMMED_LEVELS = tl.constexpr(64), tl.constexpr(6)
FEW_ROWS = tl.constexpr(64)
# A line of a GPU's caches.
LINE_BYTES = tl.constexpr(128)


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
    found, bias, out, partial, parts, epsilon, residual, gain, gained, next_sums, row, output, count, outputs, width,
    inputs: tl.constexpr, has_bias: tl.constexpr, splits: tl.constexpr, levels: tl.constexpr, epilogue: tl.constexpr,
):  # fmt: skip
    """Stores a block of outputs, float32 [rows, outputs]; the last of several splits adds the parts of all, in their order.

    `width` is that of all ranks' logits.
    """
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
    elif epilogue == LOGITS:
        place = row.to(tl.int64)[:, None] * width + output[None, :]
        tl.store(out + place, found.to(out.dtype.element_ty), mask)
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


@triton.jit
def _enter(weight, output, outputs, start, inputs: tl.constexpr, bits: tl.constexpr, lines: tl.constexpr, pdl: tl.constexpr):
    """Waits for the kernel before, while `lines` lines of each output's weights are fetched."""
    if lines:
        _fetch(weight, output, outputs, start, inputs, bits, lines)
    enter(pdl)


@triton.jit
def products(
    weight, scales, minimums, factors, rows, row_stride, output, row, more, start, size, count, outputs,
    inputs: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, block_rows: tl.constexpr, more_rows: tl.constexpr,
    block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """The products of `size` inputs from `start` on, float32 [block_outputs, rows], of both blocks of rows.

    A constant size lets the compiler keep products in flight.
    """
    found = tl.zeros([block_outputs, block_rows], tl.float32)
    found_more = tl.zeros([block_outputs, max(1, more_rows)], tl.float32)
    parts: tl.constexpr = 16 // bits  # of a block of inputs, which are multiplied one after the other
    part_inputs: tl.constexpr = block_inputs // parts
    for done in range(0, size, block_inputs):
        first = start + done
        stored, units, least = load_block(
            weight, scales, minimums, factors, output, outputs, first, inputs, bits, group, block_inputs
        )  # fmt: skip
        for part in tl.static_range(parts):
            at = first + part * part_inputs
            weights = part_weights(stored, units, least, scales, minimums, part, bits, rows.dtype.element_ty)
            found = add_product(found, weights, rows, row, at, count, row_stride, inputs, part_inputs)
            if more_rows:
                found_more = add_product(found_more, weights, rows, more, at, count, row_stride, inputs, part_inputs)
    return found, found_more


@triton.jit
def _end_tile(
    found, found_more, squares, more_squares, bias, out, partial, arrived, epsilon, residual, gain, gained, next_sums,
    row, more, output, count, outputs, mailboxes, width, first, inputs: tl.constexpr, has_bias: tl.constexpr,
    more_rows: tl.constexpr, splits: tl.constexpr, levels: tl.constexpr, epilogue: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """Stores a tile of outputs, [outputs, rows] of both blocks of rows, or its parts, which the last split adds."""
    if epilogue == LOGITS:
        logits = tl.load(mailboxes + ranks).to(tl.pointer_type(out.dtype.element_ty))
        out = tl.multiple_of(logits, 16) + first
    is_last = True
    if splits > 1:
        target = partial + tl.program_id(2) * count * outputs
        _store(target, tl.trans(found), row, output, count, outputs)
        if more_rows:
            _store(target, tl.trans(found_more), more, output, count, outputs)
        is_last = _is_last(arrived, splits)
    if is_last:
        _finish(
            tl.trans(found), bias, out, partial, squares, epsilon, residual, gain, gained, next_sums, row, output, count,
            outputs, width, inputs, has_bias, splits, levels, epilogue,
        )  # fmt: skip
        if more_rows:
            _finish(
                tl.trans(found_more), bias, out, partial, more_squares, epsilon, residual, gain, gained, next_sums, more,
                output, count, outputs, width, inputs, has_bias, splits, levels, epilogue,
            )  # fmt: skip


@triton.jit
def _send_tile(
    found, found_more, mailboxes, state, room, first, row, more, output, count, outputs, more_rows: tl.constexpr,
    ranks: tl.constexpr,
):  # fmt: skip
    """Stores a tile's parts of this split of all ranks' splits, [outputs, rows], in the mailboxes of all ranks."""
    epoch = epoch_of(state) + 1
    split = (first + tl.program_id(2)) * count * outputs
    for owner in tl.static_range(ranks):
        target = parts_of(mailboxes, owner, epoch, room) + split
        _store(target, tl.trans(found), row, output, count, outputs)
        if more_rows:
            _store(target, tl.trans(found_more), more, output, count, outputs)


@triton.jit
def _place(block_rows: tl.constexpr, more_rows: tl.constexpr, block_outputs: tl.constexpr, split_inputs: tl.constexpr):
    """The rows of this program's two blocks, its outputs, and the first of its inputs."""
    first_row = tl.program_id(1) * (block_rows + more_rows)
    row, more = first_row + tl.arange(0, block_rows), first_row + block_rows + tl.arange(0, max(1, more_rows))
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    return row, more, output, tl.program_id(2) * split_inputs


@triton.jit(do_not_specialize=["count", "rank"])
def multiply(
    rows, row_stride,  # [N, inputs], and the stride between rows
    weight,  # [outputs, inputs]; with 8 and 4 bits the words of `outrider.verify.model.gpu.quantized.Blocks`
    scales, minimums,  # [outputs, blocks up to whole groups] each, or None
    factors,  # [outputs, spans, 2] of scales and minimums, or None
    bias,  # [outputs]; unused without has_bias
    sums, epsilon,  # float32 [N, inputs / SUMMED], parts of sums of squares of rows to be normed; unused without levels
    residual, gain,  # [N, outputs]; [outputs], of the norm that follows. The epilogue RESIDUAL uses these and the next two
    gained,  # [N, outputs]: the new residual times `gain`
    next_sums,  # float32 [N, outputs / SUMMED], of the new residual
    out,  # [N, outputs], contiguous; with SWIGLU [N, outputs / 2]; with RESIDUAL the new residual
    partial,  # float32 [splits, N, outputs]; unused with one split
    arrived,  # int32, zeros, one for each tile of `out`; zeros again afterwards. Unused with one split
    count, outputs,  # N, and the number of outputs
    mailboxes,  # int64 [ranks + 1], addresses: of mailboxes, and of the logits; this and the next four are for several ranks
    state, rank,  # int64 [2]; see `exchange_kernels`
    room,  # the numbers of a place for parts; of logits, the outputs of all ranks
    first,  # of this rank's splits among those of all; of logits, of its outputs
    ranks: tl.constexpr, inputs: tl.constexpr, bits: tl.constexpr, group: tl.constexpr,  # the inputs that share a scale
    has_bias: tl.constexpr, block_rows: tl.constexpr,
    more_rows: tl.constexpr,  # of a second block, so that slightly more rows than a power of two cost little; 0 = none
    block_outputs: tl.constexpr, block_inputs: tl.constexpr,  # GROUP inputs with 8 and 4 bits
    splits: tl.constexpr, split_inputs: tl.constexpr,  # of the inputs, of which a program computes one; in whole blocks
    levels: tl.constexpr,  # the binary logarithm of the parts of a sum of squares, rounded up; -1 = normed rows
    epilogue: tl.constexpr, pdl: tl.constexpr,  # see `enter`
    ahead: tl.constexpr,  # lines of each output's weights that are fetched while the kernel before still runs
):  # fmt: skip
    """A tile of `out`, or its part from a split of the inputs."""
    row, more, output, start = _place(block_rows, more_rows, block_outputs, split_inputs)
    _enter(weight, output, outputs, start, inputs, bits, ahead, pdl)
    squares, more_squares = 0.0, 0.0
    if levels >= 0:
        if block_rows <= FEW_ROWS:  # read while the products are computed; those of more rows would take too many registers
            squares = sums_of_rows(sums, row, count, inputs // SUMMED, 1 << levels)
        if more_rows:
            more_squares = sums_of_rows(sums, more, count, inputs // SUMMED, 1 << levels)
    size = split_inputs if splits * split_inputs == inputs else tl.minimum(split_inputs, inputs - start)
    found, found_more = products(
        weight, scales, minimums, factors, rows, row_stride, output, row, more, start, size, count, outputs,
        inputs, bits, group, block_rows, more_rows, block_outputs, block_inputs,
    )  # fmt: skip
    if levels >= 0 and block_rows > FEW_ROWS:
        squares = sums_of_rows(sums, row, count, inputs // SUMMED, 1 << levels)
    if epilogue == PARTS:
        _send_tile(
            found, found_more, mailboxes, state, room, first, row, more, output, count, outputs, more_rows, ranks
        )  # fmt: skip
    else:
        _end_tile(
            found, found_more, squares, more_squares, bias, out, partial, arrived, epsilon, residual, gain, gained, next_sums,
            row, more, output, count, outputs, mailboxes, room, first, inputs, has_bias, more_rows, splits, levels, epilogue,
            ranks,
        )  # fmt: skip
    if ranks > 1:
        publish(mailboxes, state, rank, ranks)


@triton.jit(do_not_specialize=["count", "rank"])
def add_parts(
    mailboxes, state, rank, room, bias, residual, gain, out, gained, next_sums, count, outputs, ranks: tl.constexpr,
    splits: tl.constexpr, has_bias: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Waits for all ranks' parts of a product, and adds them as `multiply` does with RESIDUAL. Arguments as there."""
    enter(pdl)
    parts = parts_of(mailboxes, rank, await_all(mailboxes, state, rank, ranks), room)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    _finish(
        tl.zeros([block_rows, block_outputs], tl.float32), bias, out, parts, 0.0, 0.0, residual, gain, gained, next_sums,
        row, output, count, outputs, outputs, 1, has_bias, splits, -1, RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def await_ranks(mailboxes, state, rank, ranks: tl.constexpr, pdl: tl.constexpr):
    enter(pdl)
    await_all(mailboxes, state, rank, ranks)


@triton.jit
def embed(tokens, table, gain, out, gained, sums, count, width, block: tl.constexpr, pdl: tl.constexpr):
    """A part of a token's row of the embedding table, [tokens, width], as `store_state` stores it."""
    enter(pdl)
    row = tl.program_id(1) + tl.arange(0, 1)
    column = tl.program_id(0) * block + tl.arange(0, block)
    token = tl.load(tokens + row)
    state = tl.load(table + token[:, None] * width + column[None, :], (column < width)[None, :], 0.0)
    store_state(state, gain, out, gained, sums, row, column, count, width)
