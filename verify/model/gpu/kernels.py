"""Triton kernels of tree attention over pages: a row gets the same bits in any tree, beside any others, as alone.

What is summed together depends on a row's position alone:

- The whole blocks of text before the stream's new rows, shared by all of them, are cut into splits of a fixed number of
  positions. A program computes one split for a tile of rows, with an online softmax over its blocks.
- The block that the new rows are in is computed for each row alone, from its own keys in the order of its text: committed
  ones, then its ancestors'. A draft must end with that block for its rows to be summed as if they were committed text.

A fixed number of programs takes the work in turns, so that one captured graph serves every mix of streams and lengths. A second
kernel combines the parts of a row by their log-sum-exp. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Fields of a row (`DeviceRows.rows`) and of a stream (`DeviceRows.streams`); tables have `size` columns.
STREAM, DEPTH, PLACE, BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # BITS: the first word
LENGTH, FIRST_ROW, COUNT, FIRST_PAGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
WORD_BITS = tl.constexpr(64)


@triton.jit
def _scores(q, k, scaling, softcap, capped: tl.constexpr):
    """Scaled scores of rows by keys, float32; soft-capped if `capped`."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
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
    summed = summed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return maximum, total, summed


@triton.jit
def _row_width(pool, head_dim: tl.constexpr):
    """Elements of a row of the pool; in 8 bits, with the row's scale behind its values
    (`outrider.verify.model.cache.codec`).
    """
    return head_dim if pool.dtype.element_ty.primitive_bitwidth > 8 else (head_dim + 3) // 4 * 4 + 4


@triton.jit
def _load_rows(row, inside, dim, in_head, dtype: tl.constexpr, head_dim: tl.constexpr):
    """Values of rows that begin at `row` [K], [K, D] of `dtype`; zeros where not `inside`."""
    stored = tl.load(row[:, None] + dim[None, :], inside[:, None] & in_head[None, :], 0)
    if row.dtype.element_ty.primitive_bitwidth > 8:
        values = stored
    else:
        at = (row + _row_width(row, head_dim) - 4).to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(at, inside, 0.0)[:, None]
        if row.dtype.element_ty == tl.uint8:  # float8_e4m3fn, see `_store_row`
            bits = stored.to(tl.uint16)
            stored = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            scale *= 256.0
        values = (stored.to(tl.float32) * scale).to(dtype)
    return values


@triton.jit
def _load_block(
    layer, place, inside, value_offset, dim, in_head, page_stride, dtype, page_tokens: tl.constexpr, head_dim: tl.constexpr
):
    """Keys and values at places of the pool, [K, D]; zeros where not `inside`. `layer` points to a head of a layer."""
    row = layer + (place // page_tokens) * page_stride + (place % page_tokens) * _row_width(layer, head_dim)
    keys = _load_rows(row, inside, dim, in_head, dtype, head_dim)
    return keys, _load_rows(row + value_offset, inside, dim, in_head, dtype, head_dim)


@triton.jit
def _store_row(row, values, dim, head_dim: tl.constexpr):
    """Writes a row's values, [D], to where it begins in the pool, as `outrider.verify.model.cache.codec.encode`."""
    in_head = dim < head_dim
    if row.dtype.element_ty.primitive_bitwidth > 8:
        stored = values
    else:
        is_int: tl.constexpr = row.dtype.element_ty == tl.int8
        largest: tl.constexpr = 127.0 if is_int else 448.0
        exact = tl.where(in_head, values.to(tl.float32), 0.0)
        scale = tl.maximum(tl.max(tl.abs(exact), 0) / largest, 2.0**-24).to(values.dtype).to(tl.float32)
        scaled = tl.minimum(tl.maximum(exact / scale, -largest), largest)
        if is_int:
            stored = tl.floor(scaled + 0.5).to(tl.int8)
        else:  # float8_e4m3fn: a float16 that is 256 times smaller, without its last seven bits
            bits = (tl.abs(scaled) / 256.0).to(tl.float16).to(tl.uint16, bitcast=True)
            stored = (((bits + 0x3F + ((bits >> 7) & 1)) >> 7) | tl.where(scaled < 0.0, 0x80, 0)).to(tl.uint8)
        at = (row + _row_width(row, head_dim) - 4).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(at, scale)
    tl.store(row + dim, stored, in_head)


@triton.jit
def _store_part(out, lse, place, real, dim, in_head, largest, total, summed, head_dim: tl.constexpr):
    """Stores a part's output and log-sum-exp; no output for rows that attend to nothing in it."""
    attends = total > 0.0
    divisor = tl.where(attends, total, 1.0)
    target = out + place[:, None] * head_dim + dim[None, :]
    tl.store(target, summed / divisor[:, None], (real & attends)[:, None] & in_head[None, :])
    tl.store(lse + place, tl.where(attends, largest + tl.log(divisor), -float("inf")), real)


@triton.jit
def _attend_split(
    query, query_head, query_row, layer, page_stride, value_offset, rows, streams, pages, out, lse, scaling, softcap,
    head, stream, item,
    groups: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, window: tl.constexpr, capped: tl.constexpr,
    size: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    split_keys: tl.constexpr, parts: tl.constexpr, page_tokens: tl.constexpr,
):  # fmt: skip
    """One split of a stream's text for a tile of its rows, whose query heads share a key head."""
    length, count = tl.load(streams + LENGTH * size + stream), tl.load(streams + COUNT * size + stream) * groups
    tiles = tl.cdiv(count, block_rows)
    packed = (item % tiles) * block_rows + tl.arange(0, block_rows)
    real = packed < count
    row = tl.load(streams + FIRST_ROW * size + stream) + packed // groups
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
    start = split * split_keys
    end = tl.minimum(start + split_keys, length // block * block)
    table = pages + tl.load(streams + FIRST_PAGE * size + stream)
    if window > 0:
        position = length + tl.load(rows + DEPTH * size + row, real, 0)
        # Blocks before the first row's window change no sum.
        start = tl.maximum(start, tl.maximum(length - window + 1, 0) // block_keys * block_keys)
    for begin in range(start, end, block_keys):
        at = begin + tl.arange(0, block_keys)
        place = tl.load(table + begin // page_tokens) * page_tokens + at % page_tokens
        k, v = _load_block(layer, place, at < end, value_offset, dim, in_head, page_stride, q.dtype, page_tokens, head_dim)
        scores = _scores(q, k, scaling, softcap, capped)
        if window > 0:
            scores = tl.where(at[None, :] > position[:, None] - window, scores, -float("inf"))
        largest, total, summed = _add_block(scores, v, largest, total, summed)
    place = (row * tl.num_programs(0) * groups + query_heads) * parts + 1 + split
    _store_part(out, lse, place, real, dim, in_head, largest, total, summed, head_dim)


@triton.jit
def has_ancestor(rows, row, member, size: tl.constexpr):
    """Whether a row attends to each of these rows of its stream, which are counted from 1; all rows attend to row 0."""
    bits = tl.load(rows + (BITS + (member - 1) // WORD_BITS) * size + row)
    return ((bits >> ((member - 1) % WORD_BITS).to(tl.int64)) & 1) == 1


@triton.jit
def _path_places(rows, stream_first, count, row, length, at, committed, size: tl.constexpr):
    """Places of the keys at positions `at` that a row's path has; any where `committed`."""
    node = tl.zeros_like(at)  # 0 is the stream's first row
    for first in range(1, count, WORD_BITS):
        member = first + tl.arange(0, WORD_BITS)
        depths = tl.load(rows + DEPTH * size + stream_first + member, member < count, -1)
        on_path = has_ancestor(rows, row, member, size)[None, :] & (depths[None, :] == (at - length)[:, None])
        node += tl.sum(tl.where(on_path, member[None, :], 0), 1)
    return tl.load(rows + PLACE * size + stream_first + node, ~committed, 0)


@triton.jit
def _attend_own(
    query, query_head, query_row, layer, page_stride, value_offset, rows, streams, pages, out, lse, scaling, softcap,
    head, stream, row,
    groups: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, window: tl.constexpr, capped: tl.constexpr,
    size: tl.constexpr, block: tl.constexpr, own_rows: tl.constexpr, parts: tl.constexpr, page_tokens: tl.constexpr,
):  # fmt: skip
    """The blocks of a row from the one that its stream's new rows begin in, for the query heads that share a key head."""
    length, count = tl.load(streams + LENGTH * size + stream), tl.load(streams + COUNT * size + stream)
    first, table = tl.load(streams + FIRST_ROW * size + stream), pages + tl.load(streams + FIRST_PAGE * size + stream)
    group, dim = tl.arange(0, own_rows), tl.arange(0, padded_dim)
    real, in_head = group < groups, dim < head_dim
    query_heads = head * groups + group
    q = tl.load(
        query + (query_heads * query_head + row * query_row)[:, None] + dim[None, :], real[:, None] & in_head[None, :], 0.0
    )
    position = length + tl.load(rows + DEPTH * size + row)
    largest = tl.full([own_rows], -float("inf"), tl.float32)
    total = tl.zeros([own_rows], tl.float32)
    summed = tl.zeros([own_rows, padded_dim], tl.float32)
    for begin in range(length // block * block, position + 1, block):
        at = begin + tl.arange(0, block)
        allowed = at <= position
        if window > 0:
            allowed = allowed & (at > position - window)
        committed = at < length
        in_page = tl.load(table + at // page_tokens, committed, 0) * page_tokens + at % page_tokens
        of_path = _path_places(rows, first, count, row, length, at, committed | (at > position), size)
        place = tl.where(committed, in_page, of_path)
        k, v = _load_block(layer, place, allowed, value_offset, dim, in_head, page_stride, q.dtype, page_tokens, head_dim)
        scores = tl.where(allowed[None, :], _scores(q, k, scaling, softcap, capped), -float("inf"))
        largest, total, summed = _add_block(scores, v, largest, total, summed)
    place = (row * tl.num_programs(0) * groups + query_heads) * parts
    _store_part(out, lse, place, real, dim, in_head, largest, total, summed, head_dim)


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
    rows,  # int64 [3 + words, size], of `DeviceRows`
    streams,  # int64 [4, size]
    pages,  # int64; the streams' tables
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
    parts: tl.constexpr,
    page_tokens: tl.constexpr,
):
    """The parts of all rows; programs of a key head take the splits of all streams in turns, then the rows' own blocks."""
    head = tl.program_id(0)
    layer = pool + layer_offset + head.to(tl.int64) * head_stride
    index = tl.arange(0, padded_size)
    lengths = tl.load(streams + LENGTH * size + index, index < size, 0)
    tiles = tl.cdiv(tl.load(streams + COUNT * size + index, index < size, 0) * groups, block_rows)
    items = tl.cdiv(lengths // block * block, split_keys) * tiles
    ends = tl.cumsum(items, 0)
    shared = tl.sum(items, 0)
    for item in range(tl.program_id(1), shared + count, tl.num_programs(1)):
        if item < shared:
            stream = tl.sum((ends <= item).to(tl.int64), 0)
            _attend_split(
                query, query_head, query_row, layer, page_stride, value_offset, rows, streams, pages, out, lse, scaling,
                softcap, head, stream, item - tl.sum(tl.where(index < stream, items, 0), 0),
                groups, head_dim, padded_dim, window, capped, size, block, block_rows, block_keys, split_keys, parts,
                page_tokens,
            )  # fmt: skip
        else:
            row = item - shared
            stream = tl.load(rows + STREAM * size + row)
            if stream >= 0:
                _attend_own(
                    query, query_head, query_row, layer, page_stride, value_offset, rows, streams, pages, out, lse, scaling,
                    softcap, head, stream, row,
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
    parts: tl.constexpr,
    padded_parts: tl.constexpr,
):
    """Combines the parts of one row and head; rows without a stream are zero."""
    row, head = tl.program_id(0), tl.program_id(1)
    stream = tl.load(rows + STREAM * size + row)
    place = row * tl.num_programs(1) + head
    dim = tl.arange(0, padded_dim)
    in_head = dim < head_dim
    if stream < 0:
        tl.store(out + place * head_dim + dim, tl.zeros([padded_dim], out.dtype.element_ty), in_head)
    else:
        count = 1 + tl.cdiv(tl.load(streams + LENGTH * size + stream) // block * block, split_keys)
        part = place * parts + tl.arange(0, padded_parts)
        scores = tl.load(lse + part, part < place * parts + count, -float("inf"))
        largest = tl.max(scores, 0)
        if has_sinks:
            sink = tl.load(sinks + head).to(tl.float32)
            largest = tl.maximum(largest, sink)
        weights = tl.exp(scores - largest)
        total = tl.sum(weights, 0)
        if has_sinks:
            total += tl.exp(sink - largest)
        mask = (scores > -float("inf"))[:, None] & in_head[None, :]
        values = tl.load(parts_out + part[:, None] * head_dim + dim[None, :], mask, 0.0)
        mixed = tl.sum(values * weights[:, None], 0) / total
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
        target = layer + (place // page_tokens) * page_stride + (place % page_tokens) * _row_width(pool, head_dim)
        of_key, of_value = key + head * key_head + row * key_row, value + head * value_head + row * value_row
        _store_row(target, tl.load(of_key + dim, dim < head_dim), dim, head_dim)
        _store_row(target + value_offset, tl.load(of_value + dim, dim < head_dim), dim, head_dim)
