"""Triton kernels that read states over draft trees of any mix of streams (`outrider.verify.model.recurrent.rows`).

Each stream's states and the rows of its last step have tensors of their own, whose addresses are in device memory
(`outrider.verify.model.gpu.device_rows`), so one captured graph serves all streams. A program takes a stream's rows in
blocks, in an order in which parents precede children: what a block reads of the state and of earlier blocks are matrix
products, and the rows of a block are solved one after the other. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.product_kernels import PRECISION, folded
from outrider.verify.model.gpu.state_kernels import (
    COUNT,
    DECAYS,
    FIRST_ROW,
    KEYS,
    MATRICES,
    PATH,
    STREAM,
    WORD_BITS,
    WRITES,
    buffer_of,
)  # fmt: skip

# The tile size of a matrix product, of which words of a path have whole ones, and its binary logarithm.
BLOCK, LEVELS = tl.constexpr(16), tl.constexpr(4)


@triton.jit
def _paths(rows, row, real, start, size: tl.constexpr):
    """Whether rows of the forward, [B], descend from a block of their stream's rows, or are these themselves, [B, BLOCK].

    The block begins at `start`. False unless a row is `real`, [B].
    """
    word = tl.load(rows + (PATH + start // WORD_BITS) * size + row, real, 0)
    bits = (word >> (start - start // WORD_BITS * WORD_BITS)).to(tl.int32)
    return ((bits[:, None] >> tl.arange(0, BLOCK)[None, :]) & 1) == 1


@triton.jit
def _path_decays(decays, decay_row, rows, first, row, real, end, size: tl.constexpr):
    """The sums of decays along the paths to rows, [B], of a stream's first `end` rows.

    Each block of these is added to those before, so the order does not depend on the number of rows.
    """
    total = tl.zeros([row.shape[0]], tl.float32)
    for start in range(0, end, BLOCK):
        member = start + tl.arange(0, BLOCK)
        own = tl.load(decays + (first + member) * decay_row, member < end, 0.0)
        on_path = tl.where(_paths(rows, row, real, start, size), own[None, :], 0.0)
        total += tl.reshape(folded(on_path, LEVELS), [row.shape[0]])
    return total


@triton.jit
def _weights(path, own, others):
    """How much is left at rows of what others have written, [B, B]; zero beside their paths."""
    return tl.exp(tl.where(path, own[:, None] - others[None, :], -float("inf")))


@triton.jit
def _times_keys(left, keys, path, own, others, found, decay_dim: tl.constexpr):
    """Adds products of rows with keys, [B, B]; with decays per channel, of what is left of the keys, and only on paths.

    Differences of sums of decays are never above 0, where a quotient of their exponentials would overflow.
    """
    if decay_dim > 1:
        weights = tl.exp(tl.where(path[:, :, None], own[:, None, :] - others[None, :, :], -float("inf")))
        products = found + tl.sum(left[:, None, :] * keys[None, :, :] * weights, 2)
    else:
        products = tl.dot(left, tl.trans(keys), found, input_precision=PRECISION)
    return products


@triton.jit
def _tile(start, place, row_stride, column, real, inside):
    """Rows of a matrix, [B, C]; zeros outside."""
    return tl.load(start + place[:, None] * row_stride + column[None, :], real[:, None] & inside[None, :], 0.0)


@triton.jit
def _solved(writes, system):
    """Solves (I + the part of `system` below its diagonal) u = writes, [B, C], row by row."""
    index = tl.arange(0, BLOCK)
    for row in range(BLOCK):
        own = tl.sum(tl.where(index[:, None] == row, writes, 0.0), 0)
        column = tl.sum(tl.where((index[None, :] == row) & (index[:, None] > row), system, 0.0), 1)
        writes -= column[:, None] * own[None, :]
    return writes


@triton.jit
def _read_state(
    queries, query_row, keys, key_row, decays, decay_row, sums, matrix, kept_keys, kept_decays, rows,
    first, begin, row, place, real, count, value_at, in_value,
    is_delta: tl.constexpr, size: tl.constexpr, decay_dim: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    block_values: tl.constexpr,
):  # fmt: skip
    """Reads the state with a block's queries and keys, [B, C] each, and multiplies them by the block's keys, [B, B] each.

    What keys read, and their products, are zero unless `is_delta`. Keeps the keys and the decays, and applies these. Sums of
    decays along the paths, [B], are returned, too, unless they are per channel.
    """
    path = _paths(rows, row, real, begin, size)
    read = tl.zeros([BLOCK, block_values], tl.float32)
    removed = tl.zeros([BLOCK, block_values], tl.float32)
    by_query = tl.zeros([BLOCK, BLOCK], tl.float32)
    by_key = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, key_dim, BLOCK):
        key_at = start + tl.arange(0, BLOCK)
        in_key = key_at < key_dim
        q = _tile(queries, row, query_row, key_at, real, in_key)
        k = _tile(keys, row, key_row, key_at, real, in_key)
        state = _tile(matrix, key_at, value_dim, value_at, in_key, in_value)
        to_keys = place[:, None] * key_dim + key_at[None, :]
        if tl.program_id(2) == 0:
            tl.store(kept_keys + to_keys, k, real[:, None] & in_key[None, :])
        if decay_dim > 1:
            total = _tile(sums, row, key_dim, key_at, real, in_key)
            if tl.program_id(2) == 0:
                own = _tile(decays, row, decay_row, key_at, real, in_key)
                tl.store(kept_decays + to_keys, own, real[:, None] & in_key[None, :])
            read = tl.dot(q * tl.exp(total), state, read, input_precision=PRECISION)
        else:
            total = place  # not read
            read = tl.dot(q, state, read, input_precision=PRECISION)
        by_query = _times_keys(q, k, path, total, total, by_query, decay_dim)
        if is_delta:
            reader = k * tl.exp(total) if decay_dim > 1 else k
            removed = tl.dot(reader, state, removed, input_precision=PRECISION)
            by_key = _times_keys(k, k, path, total, total, by_key, decay_dim)
    total = place
    if decay_dim == 1:
        total = _path_decays(decays, decay_row, rows, first, row, real, tl.minimum(begin + BLOCK, count), size)
        left, weights = tl.exp(total)[:, None], _weights(path, total, total)
        read, removed, by_query, by_key = read * left, removed * left, by_query * weights, by_key * weights
        if tl.program_id(2) == 0:
            tl.store(kept_decays + place, tl.load(decays + row * decay_row, real, 0.0), real)
    return read, removed, by_query, by_key, total


@triton.jit
def _products(
    queries, query_row, keys, key_row, sums, row, real, row_before, real_before, path,
    is_delta: tl.constexpr, decay_dim: tl.constexpr, key_dim: tl.constexpr,
):  # fmt: skip
    """Products of a block's queries, and if `is_delta` of its keys, with the keys of an earlier block, [B, B] each."""
    by_query = tl.zeros([BLOCK, BLOCK], tl.float32)
    by_key = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, key_dim, BLOCK):
        key_at = start + tl.arange(0, BLOCK)
        in_key = key_at < key_dim
        before = _tile(keys, row_before, key_row, key_at, real_before, in_key)
        q = _tile(queries, row, query_row, key_at, real, in_key)
        if decay_dim > 1:
            total = _tile(sums, row, key_dim, key_at, real, in_key)
            others = _tile(sums, row_before, key_dim, key_at, real_before, in_key)
        else:
            total, others = row, row  # not read
        by_query = _times_keys(q, before, path, total, others, by_query, decay_dim)
        if is_delta:
            k = _tile(keys, row, key_row, key_at, real, in_key)
            by_key = _times_keys(k, before, path, total, others, by_key, decay_dim)
    return by_query, by_key


@triton.jit
def _read_earlier(
    queries, query_row, keys, key_row, decays, decay_row, sums, kept_writes, rows,
    first, begin, row, place, real, count, total, value_at, in_value, read, u,
    is_delta: tl.constexpr, size: tl.constexpr, decay_dim: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    """Adds what a block reads of the writes of earlier blocks to `read`, and subtracts it from the block's own writes `u`."""
    for before in range(0, begin, BLOCK):
        member = before + tl.arange(0, BLOCK)
        path = _paths(rows, row, real, before, size)
        by_query, by_key = _products(
            queries, query_row, keys, key_row, sums, row, real, first + member, member < count, path,
            is_delta, decay_dim, key_dim,
        )  # fmt: skip
        u_before = _tile(kept_writes, member, value_dim, value_at, member < count, in_value)
        if decay_dim == 1:
            others = _path_decays(decays, decay_row, rows, first, first + member, member < count, before + BLOCK, size)
            weights = _weights(path, total, others)
            by_query *= weights
            by_key *= weights
        read = tl.dot(by_query, u_before, read, input_precision=PRECISION)
        if is_delta:
            u -= tl.dot(by_key, u_before, input_precision=PRECISION)
    return read, u


@triton.jit
def sum_paths(
    decays, decay_head, decay_row,  # float32 [H, N, key_dim], and its strides between heads and rows
    out,  # float32 [H, N, key_dim], contiguous
    rows, streams,  # int64 tables of `DeviceStates`
    size: tl.constexpr, key_dim: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """The sums of decays along the path to a row, of one head and some channels; zero without a stream."""
    row, head, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    key_at = tl.program_id(2) * block_keys + tl.arange(0, block_keys)
    stream = tl.load(rows + STREAM * size + row)
    total = tl.zeros([block_keys], tl.float32)
    if stream >= 0:
        first, of_stream = tl.load(streams + FIRST_ROW * size + stream), tl.load(streams + COUNT * size + stream)
        for start in range(0, of_stream, BLOCK):
            path = tl.reshape(_paths(rows, row + tl.arange(0, 1), True, start, size), [BLOCK])
            member = first + start + tl.arange(0, BLOCK)
            own = _tile(decays + head * decay_head, member, decay_row, key_at, path, key_at < key_dim)
            total += tl.sum(folded(tl.trans(own), LEVELS), 1)
    tl.store(out + (head * count + row) * key_dim + key_at, total, key_at < key_dim)


@triton.jit
def _clear_padding(out, rows, row, head, heads, value_at, in_value, size: tl.constexpr, value_dim: tl.constexpr):
    """Writes zeros where a row has no stream."""
    if tl.load(rows + STREAM * size + row) < 0:
        target = out + (row * heads + head) * value_dim + value_at
        tl.store(target, tl.zeros_like(value_at).to(tl.float32), in_value)


@triton.jit(do_not_specialize=["layer"])
def scan(
    queries, query_head, query_row,  # float32 [H, N, key_dim], and its strides between heads and rows
    keys, key_head, key_row,  # float32 [H, N, key_dim]
    values, value_head, value_row,  # float32 [H, N, value_dim]
    decays, decay_head, decay_row,  # float32 [H, N, decay_dim]
    sums,  # float32 [H, N, key_dim], of `sum_paths`; unused with decay_dim 1
    beta, beta_head, beta_row,  # float32 [H, N]; unused without is_delta
    out,  # float32 [N, H, value_dim], contiguous; zero for rows without a stream
    rows, streams, layer,  # int64 tables of `DeviceStates`, and the layer's number
    is_delta: tl.constexpr, size: tl.constexpr, most_rows: tl.constexpr,  # of a stream's buffers
    decay_dim: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    block_values: tl.constexpr,
):  # fmt: skip
    """Reads some columns of one head's state for one stream's rows; keeps their keys, writes and decays.

    There are as many programs of streams as rows; those of rows without a stream write their zeros.
    """
    stream, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    count = tl.load(streams + COUNT * size + stream).to(tl.int32)
    value_at = tl.program_id(2) * block_values + tl.arange(0, block_values)
    in_value = value_at < value_dim
    _clear_padding(out, rows, stream, head, heads, value_at, in_value, size, value_dim)
    if count > 0:
        first = tl.load(streams + FIRST_ROW * size + stream).to(tl.int32)
        at = (layer * heads + head).to(tl.int64)  # of the state
        matrix = buffer_of(streams, MATRICES, stream, tl.float32, size) + at * key_dim * value_dim
        kept_keys = buffer_of(streams, KEYS, stream, tl.float32, size) + at * most_rows * key_dim
        kept_writes = buffer_of(streams, WRITES, stream, tl.float32, size) + at * most_rows * value_dim
        kept_decays = buffer_of(streams, DECAYS, stream, tl.float32, size) + at * most_rows * decay_dim
        own_sums = sums + head * tl.num_programs(0) * key_dim
        own_queries, own_keys, own_decays = queries + head * query_head, keys + head * key_head, decays + head * decay_head
        for begin in range(0, count, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            row, real = first + place, place < count
            read, removed, by_query, by_key, total = _read_state(
                own_queries, query_row, own_keys, key_row, own_decays, decay_row, own_sums, matrix, kept_keys, kept_decays,
                rows, first, begin, row, place, real, count, value_at, in_value,
                is_delta, size, decay_dim, key_dim, value_dim, block_values,
            )  # fmt: skip
            u = _tile(values + head * value_head, row, value_row, value_at, real, in_value) - removed
            read, u = _read_earlier(
                own_queries, query_row, own_keys, key_row, own_decays, decay_row, own_sums, kept_writes, rows,
                first, begin, row, place, real, count, total, value_at, in_value, read, u,
                is_delta, size, decay_dim, key_dim, value_dim,
            )  # fmt: skip
            if is_delta:
                b = tl.load(beta + head * beta_head + row * beta_row, real, 0.0)[:, None]
                u = _solved(u * b, by_key * b)
            read = tl.dot(by_query, u, read, input_precision=PRECISION)
            to_values = real[:, None] & in_value[None, :]
            tl.store(out + (row[:, None] * heads + head) * value_dim + value_at[None, :], read, to_values)
            tl.store(kept_writes + place[:, None] * value_dim + value_at[None, :], u, to_values)
            tl.debug_barrier()  # the next block reads the writes in other threads
