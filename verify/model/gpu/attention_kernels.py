"""Triton kernels of tree attention over pages: a row gets the same bits in any tree, beside any others, as alone.

What is summed together depends on a row's position alone:

- The whole blocks of text before the stream's new rows, shared by all of them, are cut into splits at fixed positions: the
  first `splits_per_size` have `split_keys` positions each, the next as many have twice as many each, and so on. So texts of
  any length are spread over many programs. A program computes one split for a tile of rows, with an online softmax over its
  blocks (`attend_text`). The host lists which (`outrider.verify.model.gpu.text_work`).
- The block that the new rows are in is computed for each row alone, from its own keys in the order of its text: committed
  ones, then its ancestors'. A draft must end with that block for its rows to be summed as if they were committed text. The
  same program adds the row's splits by their log-sum-exp (`attend_own`).

Softmax weights are summed by a matrix product, too, so that the order of a row's sums depends neither on the number of rows of
a tile nor on their layout. In `attend_text`, queries are the left operand: on Hopper, the scores of a row are then in the
registers of few threads. In `attend_own`, keys are the left operand, because a row has more keys than query heads.

A fixed number of programs takes the splits in turns, so that one captured graph serves every mix of streams and lengths. With
few rows, a program mostly waits for memory, so what it reads first depends on one read before it at most.
Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.pool_rows import load_rows, row_width, rows_of
from outrider.verify.model.gpu.product_kernels import PRECISION, enter

# Fields of a row (`DeviceRows.rows`, which has `size` columns), and of a piece of work in the list that begins the tables.
PLACE, DEPTH, LENGTH, SPLITS, FIRST_PAGE, PATH = map(tl.constexpr, range(6))
FIRST_ROW, COUNT, TEXT, PAGES, TILE, SPLIT = map(tl.constexpr, range(6))
WORK_FIELDS = tl.constexpr(6)
# The least rows of a product.
TOTALS = tl.constexpr(16)


@triton.jit
def _field(table, field: tl.constexpr, index, size: tl.constexpr):
    """A field of a row as int32, since numbers of 64 bits would take twice the registers."""
    return tl.load(table + field * size + index).to(tl.int32)


@triton.jit
def _split_start(split, split_keys: tl.constexpr, splits_per_size: tl.constexpr):
    """The position at which a split begins."""
    return (((split % splits_per_size + splits_per_size) << (split // splits_per_size)) - splits_per_size) * split_keys


@triton.jit
def _scores(left, right, scaling, softcap, capped: tl.constexpr):
    """Scaled scores of queries and keys, float32 [left, right]; soft-capped if `capped`."""
    scores = tl.dot(left, tl.trans(right), input_precision=PRECISION) * scaling
    if capped:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh(x) = 1 - 2 / (exp(2x) + 1)
    return scores


@triton.jit
def _add_block(scores, v, largest, totals, summed, axis: tl.constexpr):
    """Updates an online softmax with a block of keys, which are the scores' `axis`.

    The softmax is the running maximum, [rows]; the sum of weights, [rows, TOTALS] with equal columns; and the weighted sum of
    values, [rows, padded_value]. The sums are transposed if `axis` is 0.
    """
    maximum = tl.maximum(largest, tl.max(scores, axis))
    base = tl.where(maximum == -float("inf"), 0.0, maximum)  # rows that attend to nothing so far
    weights = tl.exp(scores - tl.expand_dims(base, axis)).to(v.dtype)
    rescale = tl.expand_dims(tl.exp(largest - base), axis)
    if axis == 1:
        ones = tl.full([scores.shape[1], TOTALS], 1.0, tl.float32).to(v.dtype)
        totals = tl.dot(weights, ones, totals * rescale, input_precision=PRECISION)
        summed = tl.dot(weights, v, summed * rescale, input_precision=PRECISION)
    else:
        ones = tl.full([TOTALS, scores.shape[0]], 1.0, tl.float32).to(v.dtype)
        totals = totals * rescale + tl.dot(ones, weights, input_precision=PRECISION)
        summed = summed * rescale + tl.dot(tl.trans(v), weights, input_precision=PRECISION)
    return maximum, totals, summed


@triton.jit
def _attend_split(
    query, query_head, query_row, keys, values, rows, tables, parts_out, lse, scaling, softcap, head, item,
    groups: tl.constexpr, key_dim: tl.constexpr, padded_key: tl.constexpr, key_page: tl.constexpr,
    value_dim: tl.constexpr, padded_value: tl.constexpr, value_page: tl.constexpr,
    window: tl.constexpr, capped: tl.constexpr, size: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    split_keys: tl.constexpr, splits_per_size: tl.constexpr, parts: tl.constexpr, page_tokens: tl.constexpr,
):  # fmt: skip
    """A piece of work: one split of a stream's text for a tile of its rows, whose query heads share a key head.

    Stores its output and log-sum-exp; no output for rows that attend to nothing in it.
    """
    length, split = tl.load(item + TEXT).to(tl.int32), tl.load(item + SPLIT).to(tl.int32)
    table = tables + tl.load(item + PAGES)
    packed = tl.load(item + TILE).to(tl.int32) * block_rows + tl.arange(0, block_rows)
    real = packed < tl.load(item + COUNT).to(tl.int32) * groups
    row = tl.load(item + FIRST_ROW).to(tl.int32) + packed // groups
    query_heads = head * groups + packed % groups
    dim, value_at = tl.arange(0, padded_key), tl.arange(0, padded_value)
    in_head, in_value = dim < key_dim, value_at < value_dim
    q = tl.load(
        query + (query_heads * query_head + row * query_row)[:, None] + dim[None, :], real[:, None] & in_head[None, :], 0.0
    )
    largest = tl.full([block_rows], -float("inf"), tl.float32)
    totals = tl.zeros([block_rows, TOTALS], tl.float32)
    summed = tl.zeros([block_rows, padded_value], tl.float32)
    start = _split_start(split, split_keys, splits_per_size)
    end = tl.minimum(_split_start(split + 1, split_keys, splits_per_size), length // block * block)
    if window > 0:
        position = length + tl.load(rows + DEPTH * size + row, real, 0).to(tl.int32)
        # Blocks before the first row's window change no sum.
        start = tl.maximum(start, tl.maximum(length - window + 1, 0) // block_keys * block_keys)
    in_block, key_width, value_width = tl.arange(0, block_keys), row_width(keys, key_dim), row_width(values, value_dim)
    inside = in_block >= 0  # a block of keys ends before or where the split and its page do
    for begin in range(start, end, block_keys):
        page, first = tl.load(table + begin // page_tokens), begin % page_tokens
        of_keys, of_values, at = keys + page * key_page, values + page * value_page, first + in_block
        base = of_keys + first * key_width
        k = load_rows(base, in_block * key_width, of_keys, at, inside, dim, in_head, q.dtype, key_dim, page_tokens)
        base = of_values + first * value_width
        v = load_rows(base, in_block * value_width, of_values, at, inside, value_at, in_value, q.dtype, value_dim, page_tokens)
        scores = _scores(q, k, scaling, softcap, capped)
        if window > 0:
            scores = tl.where((begin + in_block)[None, :] > position[:, None] - window, scores, -float("inf"))
        largest, totals, summed = _add_block(scores, v, largest, totals, summed, 1)
    total = tl.max(totals, 1)
    attends = total != 0.0  # NaN goes on to the row's output
    divisor = tl.where(attends, total, 1.0)
    place = (row * tl.num_programs(0) * groups + query_heads) * parts + split
    target = parts_out + place.to(tl.int64)[:, None] * value_dim + value_at[None, :]
    tl.store(target, summed / divisor[:, None], (real & attends)[:, None] & in_value[None, :])
    tl.store(lse + place, tl.where(attends, largest + tl.log(divisor), -float("inf")), real)


@triton.jit
def attend_text(
    query,  # [heads, N, key_dim]
    query_head,  # stride between heads
    query_row,  # stride between rows
    keys,  # the layer's in page 0, [kv_heads, page_tokens, stored width], see `PoolPart`; uint8 for the bits of float8_e4m3fn
    values,
    rows,  # int64 [6, size], of `DeviceRows`
    tables,  # int64; the work, the streams' pages and the rows' paths
    parts_out,  # float32 [N, heads, parts, value_dim], by split; not written where nothing is attended to
    lse,  # float32 [N, heads, parts]; log-sum-exp of the scores
    scaling,
    softcap,
    groups: tl.constexpr,  # query heads per key head
    key_dim: tl.constexpr,
    padded_key: tl.constexpr,
    key_page: tl.constexpr,  # the stride between pages
    value_dim: tl.constexpr,
    padded_value: tl.constexpr,
    value_page: tl.constexpr,
    window: tl.constexpr,  # 0 = none
    capped: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    split_keys: tl.constexpr,
    splits_per_size: tl.constexpr,
    parts: tl.constexpr,
    page_tokens: tl.constexpr,
    pdl: tl.constexpr,  # whether kernels overlap, see `enter`
):
    """The splits of all streams; the programs of a key head take them in turns."""
    enter(pdl)
    head = tl.program_id(0)
    keys, values = rows_of(keys, head, key_dim, page_tokens), rows_of(values, head, value_dim, page_tokens)
    for number in range(tl.program_id(1), tl.load(tables).to(tl.int32), tl.num_programs(1)):
        _attend_split(
            query, query_head, query_row, keys, values, rows, tables, parts_out, lse, scaling, softcap,
            head, tables + 1 + number * WORK_FIELDS,
            groups, key_dim, padded_key, key_page, value_dim, padded_value, value_page, window, capped,
            size, block, block_rows, block_keys,
            split_keys, splits_per_size, parts, page_tokens,
        )  # fmt: skip


@triton.jit
def _attend_path(
    q, keys, values, table, path, length, position, largest, totals, summed, scaling, softcap, dim, in_head, value_at, in_value,
    key_dim: tl.constexpr, key_page: tl.constexpr, value_dim: tl.constexpr, value_page: tl.constexpr,
    window: tl.constexpr, capped: tl.constexpr, block: tl.constexpr, own_keys: tl.constexpr,
    page_tokens: tl.constexpr,
):  # fmt: skip
    """Adds a row's keys to its online softmax, from the block that the new rows begin in: committed ones, then its path's."""
    for begin in range(length // block * block, position + 1, own_keys):
        at = begin + tl.arange(0, own_keys)
        allowed = at <= position
        if window > 0:
            allowed = allowed & (at > position - window)
        committed = at < length
        in_page = tl.load(table + at // page_tokens, committed, 0).to(tl.int32) * page_tokens + at % page_tokens
        of_path = tl.load(path + at - length, (at >= length) & (at <= position), 0).to(tl.int32)
        found = tl.where(committed, in_page, of_path)
        page, index = (found // page_tokens).to(tl.int64), found % page_tokens
        at_key, at_value = page * key_page, page * value_page
        row = at_key + index * row_width(keys, key_dim)
        k = load_rows(keys, row, keys + at_key, index, allowed, dim, in_head, q.dtype, key_dim, page_tokens)
        row = at_value + index * row_width(values, value_dim)
        v = load_rows(values, row, values + at_value, index, allowed, value_at, in_value, q.dtype, value_dim, page_tokens)
        scores = tl.where(allowed[:, None], _scores(k, q, scaling, softcap, capped), -float("inf"))
        largest, totals, summed = _add_block(scores, v, largest, totals, summed, 0)
    return largest, totals, summed


@triton.jit
def _part(parts_out, lse, place, part, count, real, dim, in_head, value_dim: tl.constexpr):
    """A split's log-sum-exp, [rows], and output, [padded_value, rows], for one row's heads; -inf and zeros if there is none."""
    score = tl.load(lse + place + part, real & (part < count), -float("inf"))
    target = parts_out + (place + part).to(tl.int64)[None, :] * value_dim + dim[:, None]
    value = tl.load(target, (real & (part < count))[None, :] & in_head[:, None], 0.0)
    # What was not attended to was not written.
    return score, tl.where((score == -float("inf"))[None, :], 0.0, value)


@triton.jit
def _join(largest, total, summed, score, weight, value):
    """Adds to an online softmax another of this largest `score` and total `weight`. Both may be empty, which is -inf."""
    maximum = tl.maximum(largest, score)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    factor, rescale = tl.exp(score - base), tl.exp(largest - base)
    return maximum, total * rescale + weight * factor, summed * rescale[None, :] + value * factor[None, :]


@triton.jit
def _sum_parts(
    parts_out, lse, place, count, real, dim, in_head,
    own_rows: tl.constexpr, value_dim: tl.constexpr, padded_value: tl.constexpr,
):  # fmt: skip
    """The splits of a row's text as an online softmax, in their order; four are read at once.

    It begins with nothing rather than with the row's own block: sums of tensor cores have a layout of their own, to which each
    part would be brought through shared memory.
    """
    largest, total = tl.full([own_rows], -float("inf"), tl.float32), tl.zeros([own_rows], tl.float32)
    summed = tl.zeros([padded_value, own_rows], tl.float32)
    for first in range(0, count, 4):
        score_0, value_0 = _part(parts_out, lse, place, first, count, real, dim, in_head, value_dim)
        score_1, value_1 = _part(parts_out, lse, place, first + 1, count, real, dim, in_head, value_dim)
        score_2, value_2 = _part(parts_out, lse, place, first + 2, count, real, dim, in_head, value_dim)
        score_3, value_3 = _part(parts_out, lse, place, first + 3, count, real, dim, in_head, value_dim)
        largest, total, summed = _join(largest, total, summed, score_0, 1.0, value_0)
        largest, total, summed = _join(largest, total, summed, score_1, 1.0, value_1)
        largest, total, summed = _join(largest, total, summed, score_2, 1.0, value_2)
        largest, total, summed = _join(largest, total, summed, score_3, 1.0, value_3)
    return largest, total, summed


@triton.jit
def attend_own(
    # As in `attend_text`.
    query, query_head, query_row, keys, values, rows, tables, parts_out, lse,
    apart,  # elements from keys to values of one width, which share a tensor: a number where an address would take registers
    sinks,  # [heads]; unused without has_sinks
    out,  # [N, heads, value_dim], contiguous
    scaling, softcap,
    groups: tl.constexpr, key_dim: tl.constexpr, padded_key: tl.constexpr, key_page: tl.constexpr,
    value_dim: tl.constexpr, padded_value: tl.constexpr, value_page: tl.constexpr,
    window: tl.constexpr, capped: tl.constexpr,
    has_sinks: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
    own_rows: tl.constexpr,  # `groups` at least
    own_keys: tl.constexpr,
    split_keys: tl.constexpr, splits_per_size: tl.constexpr, parts: tl.constexpr,
    page_tokens: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """The attention of one row's query heads that share a key head; zero for a row that pads the forward.

    Computes the blocks from the one on that the stream's new rows begin in, and adds the splits of the text before.
    """
    enter(pdl)
    head, row = tl.program_id(0), tl.program_id(1)
    keys = rows_of(keys, head, key_dim, page_tokens)
    values = keys + apart if key_dim == value_dim else rows_of(values, head, value_dim, page_tokens)
    length = _field(rows, LENGTH, row, size)
    position = length + _field(rows, DEPTH, row, size)
    table, path = tables + _field(rows, FIRST_PAGE, row, size), tables + _field(rows, PATH, row, size)
    group, dim, value_at = tl.arange(0, own_rows), tl.arange(0, padded_key), tl.arange(0, padded_value)
    real, in_head, in_value = group < groups, dim < key_dim, value_at < value_dim
    query_heads = head * groups + group
    place = row * tl.num_programs(0) * groups + query_heads
    summed = tl.zeros([padded_value, own_rows], tl.float32)
    if _field(rows, PLACE, row, size) >= 0:
        q = tl.load(
            query + (query_heads * query_head + row * query_row)[:, None] + dim[None, :], real[:, None] & in_head[None, :], 0.0
        )
        largest = tl.full([own_rows], -float("inf"), tl.float32)
        totals = tl.zeros([TOTALS, own_rows], tl.float32)
        if has_sinks:
            largest = tl.load(sinks + query_heads, real, 0.0).to(tl.float32)
            totals += 1.0
        largest, totals, summed = _attend_path(
            q, keys, values, table, path, length, position, largest, totals, summed, scaling, softcap,
            dim, in_head, value_at, in_value, key_dim, key_page, value_dim, value_page, window, capped, block, own_keys,
            page_tokens,
        )  # fmt: skip
        count = _field(rows, SPLITS, row, size)
        of_text, weight, value = _sum_parts(
            parts_out, lse, place * parts, count, real, value_at, in_value, own_rows, value_dim, padded_value
        )
        largest, total, summed = _join(largest, tl.max(totals, 0), summed, of_text, weight, value)
        summed = summed / total[None, :]
    target = out + place.to(tl.int64)[None, :] * value_dim + value_at[:, None]
    tl.store(target, summed.to(out.dtype.element_ty), real[None, :] & in_value[:, None])
