"""Triton kernels of mixtures of experts, in which a row gets the same bits in any number of rows, whatever the others choose.

A slot is one of the experts that a row chooses: slot s is of row s // chosen. A piece of work is an expert with up to a tile of
the slots that chose it. Products are those of `outrider.verify.model.gpu.product_kernels`: weights are the left matrix, and a
piece's rows are the columns of the right one, so it does not matter to a row which others are in its piece. The outputs of a
row's experts are added in the order in which the row chose them.

Grids depend on the numbers of rows and experts alone, so that a captured graph serves any choice: a grid has a program for each
piece that there can be, and those without one end at once. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.product_kernels import products

# Fields of a piece of work.
EXPERT, FIRST, COUNT = map(tl.constexpr, range(3))
WORK_FIELDS = tl.constexpr(3)
# How experts join gate and up.
SILU, GELU, GELU_TANH, CLAMPED = map(tl.constexpr, range(4))
# The experts for which one program lists the work, and the slots that it compares with them at once.
LISTED = tl.constexpr(16)
COMPARED = tl.constexpr(128)


@triton.jit
def _in_groups(
    rank, of_group, expert, groups: tl.constexpr, padded_groups: tl.constexpr, used: tl.constexpr, summed: tl.constexpr
):  # fmt: skip
    """The ranks of experts in the groups that are used, and of others -inf; experts are `of_group`."""
    group = tl.arange(0, padded_groups)
    found = tl.where(of_group[None, :] == group[:, None], rank[None, :], -float("inf"))
    total = tl.where(group < groups, 0.0, -float("inf"))
    for _ in tl.static_range(summed):
        total += tl.max(found, 1)
        found = tl.where(expert[None, :] == tl.argmax(found, 1)[:, None], -float("inf"), found)
    is_used = of_group < 0
    for _ in tl.static_range(used):
        best = tl.argmax(total, 0)
        is_used, total = is_used | (of_group == best), tl.where(group == best, -float("inf"), total)
    return tl.where(is_used, rank, -float("inf"))


@triton.jit
def choose(
    logits,  # [N, experts]
    bias,  # float32 [experts], added to choose, but not to weigh; unused without has_bias
    shares,  # [N, chosen]
    index,  # int64 [N, chosen]
    experts: tl.constexpr,
    chosen: tl.constexpr,
    padded_experts: tl.constexpr,
    padded_chosen: tl.constexpr,
    is_sigmoid: tl.constexpr,  # else softmax
    has_bias: tl.constexpr,
    is_normed: tl.constexpr,  # shares of a row add up to `scale`
    epsilon: tl.constexpr,
    scale: tl.constexpr,
    groups: tl.constexpr,  # experts are chosen in the `used` ones with the largest sums of their `summed` best experts
    padded_groups: tl.constexpr,
    used: tl.constexpr,
    summed: tl.constexpr,
):
    """The experts of a row, the best first, and their shares."""
    row = tl.program_id(0)
    expert, place = tl.arange(0, padded_experts), tl.arange(0, padded_chosen)
    found = tl.load(logits + row * experts + expert, expert < experts, -float("inf")).to(tl.float32)
    if is_sigmoid:
        score = 1.0 / (1.0 + tl.exp(-found))
    else:
        score = tl.exp(found - tl.max(found, 0))
        score = score / tl.sum(score, 0)
    rank = found
    if has_bias:
        rank = tl.where(expert < experts, score + tl.load(bias + expert, expert < experts, 0.0), -float("inf"))
    if groups > 1:
        rank = _in_groups(rank, expert // (experts // groups), expert, groups, padded_groups, used, summed)
    values, numbers = tl.zeros([padded_chosen], tl.float32), tl.zeros([padded_chosen], tl.int64)
    total = 0.0
    for number in tl.static_range(chosen):
        best = tl.minimum(tl.argmax(rank, 0), experts - 1)  # of numbers that are none, too
        value = tl.sum(tl.where(expert == best, score, 0.0), 0)
        values, numbers = tl.where(place == number, value, values), tl.where(place == number, best, numbers)
        rank = tl.where(expert == best, -float("inf"), rank)
        total += value
    if is_normed:
        values = values / (total + epsilon)
    target = row * chosen + place
    tl.store(shares + target, (values * scale).to(shares.dtype.element_ty), place < chosen)
    tl.store(index + target, numbers, place < chosen)


@triton.jit(do_not_specialize=["slots", "pieces"])
def list_work(
    index,  # int64 [slots], the expert of each
    order,  # int32 [slots]: the slots of the first expert, of the second one, and so on
    work,  # int32 [pieces, WORK_FIELDS]: an expert, and the first and the number of its slots in `order`; 0 = none
    touched,  # int32 [1], to which the number of experts with slots is added
    slots,
    pieces,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,  # more than there are experts
    tile: tl.constexpr,  # the most slots of a piece
):
    """Lists the pieces of LISTED experts."""
    expert, own = tl.arange(0, padded_experts), tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    counts = tl.zeros([padded_experts], tl.int32)
    for begin in range(0, slots, COMPARED):
        slot = begin + tl.arange(0, COMPARED)
        counts += tl.histogram(tl.load(index + slot, slot < slots, experts).to(tl.int32), padded_experts)
    counts = tl.where(expert < experts, counts, 0)
    tiles = (counts + tile - 1) // tile
    is_own = (own[:, None] == expert[None, :]).to(tl.int32)
    own_count, own_tiles = tl.sum(is_own * counts[None, :], 1), tl.sum(is_own * tiles[None, :], 1)
    own_first = tl.sum(is_own * (tl.cumsum(counts, 0) - counts)[None, :], 1)
    own_piece = tl.sum(is_own * (tl.cumsum(tiles, 0) - tiles)[None, :], 1)
    first = own_first
    for begin in range(0, slots, COMPARED):
        slot = begin + tl.arange(0, COMPARED)
        of_own = (tl.load(index + slot, slot < slots, -1)[:, None] == own[None, :]).to(tl.int32)
        place = tl.sum(of_own * (tl.cumsum(of_own, 0) - of_own + first[None, :]), 1)
        tl.store(order + place, slot, tl.sum(of_own, 1) > 0)
        first += tl.sum(of_own, 0)
    for number in range(tl.max(own_tiles, 0)):
        target = work + (own_piece + number) * WORK_FIELDS
        tl.store(target + EXPERT, own, number < own_tiles)
        tl.store(target + FIRST, own_first + number * tile, number < own_tiles)
        tl.store(target + COUNT, tl.minimum(own_count - number * tile, tile), number < own_tiles)
    if tl.program_id(0) == 0:
        tl.atomic_add(touched, tl.sum((counts > 0).to(tl.int32), 0))
        for begin in range(tl.sum(tiles, 0), pieces, COMPARED):
            piece = begin + tl.arange(0, COMPARED)
            tl.store(work + piece * WORK_FIELDS + COUNT, 0, piece < pieces)


@triton.jit
def _piece(index, order, work, slots, tile: tl.constexpr, is_single: tl.constexpr):
    """The program's expert, how many slots it has, and which, [tile]; `slots` beyond them. A single row's are not listed."""
    piece, at = tl.program_id(1), tl.arange(0, tile)
    if is_single:
        expert, count = tl.load(index + piece).to(tl.int32), 1
        slot = tl.where(at < 1, piece, slots)
    else:
        item = work + piece * WORK_FIELDS
        expert, count = tl.load(item + EXPERT), tl.load(item + COUNT)
        slot = tl.load(order + tl.load(item + FIRST) + at, at < count, slots)
    return expert, count, slot


@triton.jit
def _joined(gate, up, how: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr):
    """What an expert makes of gate and up."""
    if how == CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate / (1.0 + tl.exp(-alpha * gate)) * up
    elif how == SILU:
        return gate / (1.0 + tl.exp(-gate)) * up
    elif how == GELU:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up  # tanh(x) = 1 - 2 / (exp(2x) + 1)


@triton.jit(do_not_specialize=["slots"])
def gate_up(
    rows,  # [N, inputs]
    row_stride,
    weight,  # [experts, 2 * outputs, inputs], or as `multiply`'s of fewer bits, and so are the planes after it
    scales,
    minimums,
    factors,
    bias,  # [experts, 2 * outputs]; unused without has_bias
    index,  # as `list_work`'s
    order,
    work,
    out,  # [slots, outputs], contiguous
    slots,
    outputs,
    experts: tl.constexpr,
    chosen: tl.constexpr,  # by a row
    inputs: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    has_bias: tl.constexpr,
    in_turns: tl.constexpr,  # outputs of gate and up take turns; else all of gate come first
    how: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    is_single: tl.constexpr,
    tile: tl.constexpr,
    block_outputs: tl.constexpr,  # of gate and up together
    block_inputs: tl.constexpr,
):
    """Gate and up of a piece, joined: half a block of outputs."""
    expert, count, slot = _piece(index, order, work, slots, tile, is_single)
    if count > 0:
        half: tl.constexpr = block_outputs // 2
        both, first = tl.arange(0, block_outputs), tl.program_id(0) * half
        output, part = first + both // 2, both % 2
        output = tl.where(output < outputs, output * 2 + part if in_turns else part * outputs + output, 2 * outputs)
        output = tl.where(output < 2 * outputs, expert * 2 * outputs + output, experts * 2 * outputs)
        row = slot // chosen
        found, _ = products(
            weight, scales, minimums, factors, rows, row_stride, output, row, row, 0, inputs, slots // chosen,
            experts * 2 * outputs, inputs, bits, group, tile, 0, block_outputs, block_inputs,
        )  # fmt: skip
        if has_bias:
            found += tl.load(bias + output, output < experts * 2 * outputs, 0.0).to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(found, [half, 2, tile]), (0, 2, 1)))
        joined = tl.trans(_joined(gate, up, how, alpha, limit))
        output = first + tl.arange(0, half)
        place = slot.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(out + place, joined.to(out.dtype.element_ty), (slot < slots)[:, None] & (output < outputs)[None, :])


@triton.jit
def _add_experts(
    partial, shares, bias, index, out, row, output, slots, outputs,
    chosen: tl.constexpr, has_bias: tl.constexpr, splits: tl.constexpr, added_rows: tl.constexpr, block_outputs: tl.constexpr,
):  # fmt: skip
    """Adds the outputs of rows' experts, times their shares, in the order in which the rows chose them, to a tile of `out`."""
    real, inside = row < slots // chosen, output < outputs
    added = tl.zeros([added_rows, block_outputs], tl.float32)
    for number in tl.static_range(chosen):
        of_row = row * chosen + number
        value = tl.zeros([added_rows, block_outputs], tl.float32)
        for split in tl.static_range(splits):
            # Other multiprocessors wrote the parts, so they are read from the cache that all share.
            place = (split * slots + of_row).to(tl.int64)[:, None] * outputs + output[None, :]
            value += tl.load(partial + place, real[:, None] & inside[None, :], 0.0, cache_modifier=".cg")
        if has_bias:
            of_expert = tl.load(index + of_row, real, 0)[:, None] * outputs + output[None, :]
            value += tl.load(bias + of_expert, real[:, None] & inside[None, :], 0.0).to(tl.float32)
        share = tl.load(shares + of_row, real, 0.0).to(tl.float32)
        added = tl.fma(value, tl.broadcast_to(share[:, None], value.shape), added)
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + place, added.to(out.dtype.element_ty), real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["slots"])
def down(
    rows,  # [slots, inputs], contiguous
    weight,  # [experts, outputs, inputs], as `gate_up`'s
    scales,
    minimums,
    factors,
    bias,  # [experts, outputs]; unused without has_bias
    index,
    order,
    work,
    shares,  # [slots], of each expert's outputs in its row's
    partial,  # float32 [splits, slots, outputs]
    arrived,  # int32, zeros, one for each tile of outputs; zeros again afterwards
    out,  # [N, outputs], contiguous
    slots,
    outputs,
    experts: tl.constexpr,
    chosen: tl.constexpr,
    inputs: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    has_bias: tl.constexpr,
    is_single: tl.constexpr,
    tile: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    split_inputs: tl.constexpr,
    splits: tl.constexpr,
    added_rows: tl.constexpr,  # whose experts are added at once
):
    """Down of a piece, or a split's part of it. The last program of a tile of outputs adds each row's experts."""
    expert, count, slot = _piece(index, order, work, slots, tile, is_single)
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    inside = output < outputs
    if count > 0:
        of_expert = tl.where(inside, expert * outputs + output, experts * outputs)
        begin = tl.program_id(2) * split_inputs
        found, _ = products(
            weight, scales, minimums, factors, rows, inputs, of_expert, slot, slot, begin,
            tl.minimum(split_inputs, inputs - begin), slots, experts * outputs,
            inputs, bits, group, tile, 0, block_outputs, block_inputs,
        )  # fmt: skip
        place = (tl.program_id(2) * slots + slot).to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(partial + place, tl.trans(found), (slot < slots)[:, None] & inside[None, :])
    tl.debug_barrier()  # all threads have stored the part before one of them says so
    programs = tl.num_programs(1) * splits
    if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == programs - 1:
        tl.atomic_xchg(arrived + tl.program_id(0), 0)
        for first in range(0, slots // chosen, added_rows):
            row = first + tl.arange(0, added_rows)
            _add_experts(
                partial, shares, bias, index, out, row, output, slots, outputs,
                chosen, has_bias, splits, added_rows, block_outputs,
            )  # fmt: skip
