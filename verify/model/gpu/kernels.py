"""Triton kernels of tree attention over pages: a row gets the same bits in any tree, beside any others, as alone.

What is summed together depends on a row's position alone:

- The whole blocks of text before the stream's new rows, shared by all of them, are cut into splits at fixed positions: the
  first `splits_per_size` have `split_keys` positions each, the next as many have twice as many each, and so on. So texts of
  any length are spread over many programs. A program computes one split for a tile of rows, with an online softmax over its
  blocks.
- The block that the new rows are in is computed for each row alone, from its own keys in the order of its text: committed
  ones, then its ancestors'. A draft must end with that block for its rows to be summed as if they were committed text.

A fixed number of programs takes the work in turns, so that one captured graph serves every mix of streams and lengths. A second
kernel combines the parts of a row by their log-sum-exp. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.pool_rows import load_rows, row_width, store_row
from outrider.verify.model.gpu.precision import PRECISION

# Fields of a row (`DeviceRows.rows`) and of a stream (`DeviceRows.streams`), which have `size` columns.
STREAM, DEPTH, PLACE, PATH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
LENGTH, FIRST_ROW, COUNT, FIRST_PAGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _field(table, field: tl.constexpr, index, size: tl.constexpr):
    """A field of rows or streams as int32, since numbers of 64 bits would take twice the registers."""
    return tl.load(table + field * size + index).to(tl.int32)


@triton.jit
def _split_start(split, split_keys: tl.constexpr, splits_per_size: tl.constexpr):
    """The position at which a split begins."""
    return (((split % splits_per_size + splits_per_size) << (split // splits_per_size)) - splits_per_size) * split_keys


@triton.jit
def _split_count(positions, split_keys: tl.constexpr, splits_per_size: tl.constexpr, parts: tl.constexpr):
    """The number of splits of a text of `positions` tokens."""
    count = positions * 0
    for doublings in tl.static_range((parts - 1 + splits_per_size - 1) // splits_per_size):
        behind = tl.maximum(positions - ((1 << doublings) - 1) * splits_per_size * split_keys, 0)
        count += tl.minimum(tl.cdiv(behind, split_keys << doublings), splits_per_size)
    return count


@triton.jit
def _scores(q, k, scaling, softcap, capped: tl.constexpr):
    """Scaled scores of rows by keys, float32; soft-capped if `capped`."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
    if capped:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh(x) = 1 - 2 / (exp(2x) + 1)
    return scores


@triton.jit
def _add_block(scores, v, largest, total, summed):
    """Updates an online softmax with a block of keys: running maximum, sum of weights, weighted sum of values."""
    maximum = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(maximum == -float("inf"), 0.0, maximum)  # rows that attend to nothing so far
    weights = tl.exp(scores - base[:, None])
    rescale = tl.exp(largest - base)
    total = total * rescale + tl.sum(weights, 1)
    summed = summed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return maximum, total, summed


@triton.jit
def _store_part(out, lse, place, real, dim, in_head, largest, total, summed, head_dim: tl.constexpr):
    """Stores a part's output and log-sum-exp; no output for rows that attend to nothing in it."""
    attends = total > 0.0
    divisor = tl.where(attends, total, 1.0)
    target = out + place.to(tl.int64)[:, None] * head_dim + dim[None, :]
    tl.store(target, summed / divisor[:, None], (real & attends)[:, None] & in_head[None, :])
    tl.store(lse + place, tl.where(attends, largest + tl.log(divisor), -float("inf")), real)


@triton.jit
def _attend_split(
    query, query_head, query_row, layer, page_stride, value_offset, rows, streams, tables, out, lse, scaling, softcap,
    head, stream, item,
    groups: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, window: tl.constexpr, capped: tl.constexpr,
    size: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    split_keys: tl.constexpr, splits_per_size: tl.constexpr, parts: tl.constexpr, page_tokens: tl.constexpr,
):  # fmt: skip
    """One split of a stream's text for a tile of its rows, whose query heads share a key head."""
    length, count = _field(streams, LENGTH, stream, size), _field(streams, COUNT, stream, size) * groups
    tiles = tl.cdiv(count, block_rows)
    packed = (item % tiles) * block_rows + tl.arange(0, block_rows)
    real = packed < count
    row = _field(streams, FIRST_ROW, stream, size) + packed // groups
    query_heads = head * groups + packed % groups
    dim = tl.arange(0, padded_dim)
    in_head = dim < head_dim
    q = tl.load(
        query + (query_heads * query_head + row * query_row)[:, None] + dim[None, :], real[:, None] & in_head[None, :], 0.0
    )
    largest = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    summed = tl.zeros([block_rows, padded_dim], tl.float32)
    split = item // tiles
    start = _split_start(split, split_keys, splits_per_size)
    end = tl.minimum(_split_start(split + 1, split_keys, splits_per_size), length // block * block)
    table = tables + _field(streams, FIRST_PAGE, stream, size)
    if window > 0:
        position = length + tl.load(rows + DEPTH * size + row, real, 0).to(tl.int32)
        # Blocks before the first row's window change no sum.
        start = tl.maximum(start, tl.maximum(length - window + 1, 0) // block_keys * block_keys)
    in_block, width = tl.arange(0, block_keys), row_width(layer, head_dim)
    inside = in_block >= 0  # a block of keys ends before or where the split and its page do
    for begin in range(start, end, block_keys):
        keys = layer + tl.load(table + begin // page_tokens) * page_stride + begin % page_tokens * width
        k = load_rows(keys, in_block * width, inside, dim, in_head, q.dtype, head_dim)
        v = load_rows(keys + value_offset, in_block * width, inside, dim, in_head, q.dtype, head_dim)
        scores = _scores(q, k, scaling, softcap, capped)
        if window > 0:
            at = begin + in_block
            scores = tl.where(at[None, :] > position[:, None] - window, scores, -float("inf"))
        largest, total, summed = _add_block(scores, v, largest, total, summed)
    place = (row * tl.num_programs(0) * groups + query_heads) * parts + 1 + split
    _store_part(out, lse, place, real, dim, in_head, largest, total, summed, head_dim)


@triton.jit
def _attend_own(
    query, query_head, query_row, layer, page_stride, value_offset, rows, streams, tables, out, lse, scaling, softcap,
    head, row,
    groups: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, window: tl.constexpr, capped: tl.constexpr,
    size: tl.constexpr, block: tl.constexpr, own_rows: tl.constexpr, parts: tl.constexpr, page_tokens: tl.constexpr,
):  # fmt: skip
    """The blocks of a row from the one that its stream's new rows begin in, for the query heads that share a key head.

    Nothing for a row without a stream.
    """
    stream = _field(rows, STREAM, row, size)
    if stream >= 0:
        length, position = _field(streams, LENGTH, stream, size), _field(rows, DEPTH, row, size)
        position += length
        table, path = tables + _field(streams, FIRST_PAGE, stream, size), tables + _field(rows, PATH, row, size)
        group, dim = tl.arange(0, own_rows), tl.arange(0, padded_dim)
        real, in_head = group < groups, dim < head_dim
        query_heads = head * groups + group
        q = tl.load(
            query + (query_heads * query_head + row * query_row)[:, None] + dim[None, :], real[:, None] & in_head[None, :], 0.0
        )
        largest = tl.full([own_rows], -float("inf"), tl.float32)
        total = tl.zeros([own_rows], tl.float32)
        summed = tl.zeros([own_rows, padded_dim], tl.float32)
        for begin in range(length // block * block, position + 1, block):
            at = begin + tl.arange(0, block)
            allowed = at <= position
            if window > 0:
                allowed = allowed & (at > position - window)
            committed = at < length
            in_page = tl.load(table + at // page_tokens, committed, 0).to(tl.int32) * page_tokens + at % page_tokens
            of_path = tl.load(path + at - length, (at >= length) & (at <= position), 0).to(tl.int32)
            place = tl.where(committed, in_page, of_path)
            key = (place // page_tokens).to(tl.int64) * page_stride + place % page_tokens * row_width(layer, head_dim)
            k = load_rows(layer, key, allowed, dim, in_head, q.dtype, head_dim)
            v = load_rows(layer + value_offset, key, allowed, dim, in_head, q.dtype, head_dim)
            scores = tl.where(allowed[None, :], _scores(q, k, scaling, softcap, capped), -float("inf"))
            largest, total, summed = _add_block(scores, v, largest, total, summed)
        place = (row * tl.num_programs(0) * groups + query_heads) * parts
        _store_part(out, lse, place, real, dim, in_head, largest, total, summed, head_dim)


@triton.jit
def _splits(
    streams, groups: tl.constexpr, size: tl.constexpr, padded_size: tl.constexpr, block: tl.constexpr,
    block_rows: tl.constexpr, split_keys: tl.constexpr, splits_per_size: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """How many splits the tiles of each stream's rows have together, [padded_size]."""
    index = tl.arange(0, padded_size)
    lengths = tl.load(streams + LENGTH * size + index, index < size, 0).to(tl.int32)
    tiles = tl.cdiv(tl.load(streams + COUNT * size + index, index < size, 0).to(tl.int32) * groups, block_rows)
    return _split_count(lengths // block * block, split_keys, splits_per_size, parts) * tiles


@triton.jit(do_not_specialize=["count"])
def attend(
    query,  # [heads, N, D]
    query_head,  # stride between heads
    query_row,  # stride between rows
    pool,  # [pages, layers, 2, kv_heads, page_tokens, stored width]; uint8 for the bits of float8_e4m3fn
    page_stride,
    layer_offset,  # of the layer in a page
    head_stride,  # between key heads
    value_offset,  # of a value from its key
    rows,  # int64 [4, size], of `DeviceRows`
    streams,  # int64 [4, size]
    tables,  # int64; the streams' pages and the rows' paths
    out,  # float32 [N, heads, parts, D]; the row's own block, then its splits; not written where nothing is attended to
    lse,  # float32 [N, heads, parts]; log-sum-exp of the scores
    scaling,
    softcap,
    count,  # N
    groups: tl.constexpr,  # query heads per key head
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    window: tl.constexpr,  # 0 = none
    capped: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,  # a power of two
    block: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    own_rows: tl.constexpr,
    split_keys: tl.constexpr,
    splits_per_size: tl.constexpr,
    parts: tl.constexpr,
    page_tokens: tl.constexpr,
):
    """The parts of all rows; programs of a key head take the splits of all streams in turns, then the rows' own blocks."""
    head = tl.program_id(0)
    layer = pool + layer_offset + head.to(tl.int64) * head_stride
    index = tl.arange(0, padded_size)
    items = _splits(streams, groups, size, padded_size, block, block_rows, split_keys, splits_per_size, parts)
    ends = tl.cumsum(items, 0)
    shared = tl.sum(items, 0)
    for item in range(tl.program_id(1), shared + count, tl.num_programs(1)):
        if item < shared:
            stream = tl.sum((ends <= item).to(tl.int32), 0)
            _attend_split(
                query, query_head, query_row, layer, page_stride, value_offset, rows, streams, tables, out, lse, scaling,
                softcap, head, stream, item - tl.sum(tl.where(index < stream, items, 0), 0),
                groups, head_dim, padded_dim, window, capped, size, block, block_rows, block_keys, split_keys,
                splits_per_size, parts, page_tokens,
            )  # fmt: skip
        else:
            _attend_own(
                query, query_head, query_row, layer, page_stride, value_offset, rows, streams, tables, out, lse, scaling,
                softcap, head, item - shared,
                groups, head_dim, padded_dim, window, capped, size, block, own_rows, parts, page_tokens,
            )  # fmt: skip


@triton.jit
def combine(
    parts_out,  # float32 [N, heads, parts, D]
    lse,  # float32 [N, heads, parts]
    sinks,  # [heads]; unused without has_sinks
    rows,
    streams,
    out,  # [N, heads, D], contiguous
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    has_sinks: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    split_keys: tl.constexpr,
    splits_per_size: tl.constexpr,
    parts: tl.constexpr,
    block_parts: tl.constexpr,
):
    """Combines the parts of one row and head, a block of them at a time; rows without a stream are zero."""
    row, head = tl.program_id(0), tl.program_id(1)
    stream = _field(rows, STREAM, row, size)
    place = (row * tl.num_programs(1) + head).to(tl.int64)
    dim = tl.arange(0, padded_dim)
    in_head = dim < head_dim
    mixed = tl.zeros([padded_dim], tl.float32)
    if stream >= 0:
        count = 1 + _split_count(_field(streams, LENGTH, stream, size) // block * block, split_keys, splits_per_size, parts)
        largest, total = -float("inf"), 0.0
        if has_sinks:
            largest, total = tl.load(sinks + head).to(tl.float32), 1.0
        for first in range(0, count, block_parts):
            part = first + tl.arange(0, block_parts)
            scores = tl.load(lse + place * parts + part, part < count, -float("inf"))
            maximum = tl.maximum(largest, tl.max(scores, 0))  # of the row's own block at least, so it is a number
            weights, rescale = tl.exp(scores - maximum), tl.exp(largest - maximum)
            mask = (scores > -float("inf"))[:, None] & in_head[None, :]
            values = tl.load(parts_out + (place * parts + part)[:, None] * head_dim + dim[None, :], mask, 0.0)
            total = total * rescale + tl.sum(weights, 0)
            mixed = mixed * rescale + tl.sum(values * weights[:, None], 0)
            largest = maximum
        mixed = mixed / total
    tl.store(out + place * head_dim + dim, mixed.to(out.dtype.element_ty), in_head)


@triton.jit
def write(
    key,  # [kv_heads, N, D]
    key_head,  # stride between heads
    key_row,  # stride between rows
    value,
    value_head,
    value_row,
    pool,  # this and all below as in `attend`
    page_stride,
    layer_offset,
    head_stride,
    value_offset,
    rows,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    size: tl.constexpr,
    page_tokens: tl.constexpr,
):
    """Writes the keys and values of one row and head to the row's place."""
    head, row = tl.program_id(0), tl.program_id(1)
    if tl.load(rows + STREAM * size + row) >= 0:
        dim = tl.arange(0, padded_dim)
        place = tl.load(rows + PLACE * size + row)
        layer = pool + layer_offset + head.to(tl.int64) * head_stride
        target = layer + (place // page_tokens) * page_stride + (place % page_tokens) * row_width(pool, head_dim)
        of_key, of_value = key + head * key_head + row * key_row, value + head * value_head + row * value_row
        store_row(target, tl.load(of_key + dim, dim < head_dim), dim, head_dim)
        store_row(target + value_offset, tl.load(of_value + dim, dim < head_dim), dim, head_dim)
