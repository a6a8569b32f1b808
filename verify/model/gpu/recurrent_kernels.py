"""Triton kernels of recurrent layers over draft trees of any mix of streams (`outrider.verify.model.recurrent.rows`).

Each stream's states and the rows of its last step have tensors of their own, whose addresses are in device memory
(`outrider.verify.model.gpu.device_rows`), so one captured graph serves all streams. A program takes a stream's rows in
blocks, in an order in which parents precede children: what a block reads of the state and of earlier blocks are matrix
products, and the rows of a block are solved one after the other. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.product_kernels import PRECISION

# Fields of a stream (`DeviceStates.streams`); tables have `size` columns. The last five are addresses of `RecurrentStates`.
FIRST_ROW, COUNT, FOLDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MATRICES, KEYS, WRITES = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
DECAYS, INPUTS = tl.constexpr(6), tl.constexpr(7)
# Fields of a row (`DeviceStates.rows`): its stream, and its path, whose words precede the places that a convolution reads.
STREAM, PATH = tl.constexpr(0), tl.constexpr(1)
WORD_BITS = tl.constexpr(64)


@triton.jit
def _buffer(streams, field, stream, kind: tl.constexpr, size: tl.constexpr):
    """One of a stream's tensors. torch aligns them to 64 bytes or more."""
    return tl.multiple_of(tl.load(streams + field * size + stream).to(tl.pointer_type(kind)), 16)


@triton.jit
def _on_path(rows, row, member, size: tl.constexpr):
    """Whether rows of the forward, [B, 1], descend from members of their stream, [1, M], or are these themselves."""
    word = tl.load(rows + (PATH + member // WORD_BITS) * size + row)
    return ((word >> (member % WORD_BITS).to(tl.int64)) & 1) == 1


@triton.jit
def _path_decays(decays, decay_row, rows, first, place, count, size: tl.constexpr, padded_rows: tl.constexpr):
    """The sums of decays along the paths to a stream's rows `place`, [B]."""
    member = tl.arange(0, padded_rows)
    own = tl.load(decays + (first + member) * decay_row, member < count, 0.0)
    row = first + tl.minimum(place, count - 1)
    path = _on_path(rows, row[:, None], tl.minimum(member, count - 1)[None, :], size)
    return tl.sum(tl.where(path & (member < count)[None, :], own[None, :], 0.0), 1)


@triton.jit
def _weights(rows, first, place, member, count, own, others, size: tl.constexpr):
    """How much is left at rows `place` of what rows `member` have written, [B, B]; zero beside their paths."""
    row = first + tl.minimum(place, count - 1)
    path = _on_path(rows, row[:, None], tl.minimum(member, count - 1)[None, :], size)
    real = (place < count)[:, None] & (member < count)[None, :]
    return tl.exp(tl.where(path & real, own[:, None] - others[None, :], -float("inf")))


@triton.jit
def _tile(start, place, row_stride, column, real, inside):
    """Rows of a matrix, [B, C]; zeros outside."""
    return tl.load(start + place[:, None] * row_stride + column[None, :], real[:, None] & inside[None, :], 0.0)


@triton.jit
def _solved(writes, system, block_rows: tl.constexpr):
    """Solves (I + the part of `system` below its diagonal) u = writes, [B, C], row by row."""
    index = tl.arange(0, block_rows)
    for row in range(block_rows):
        own = tl.sum(tl.where(index[:, None] == row, writes, 0.0), 0)
        column = tl.sum(tl.where((index[None, :] == row) & (index[:, None] > row), system, 0.0), 1)
        writes -= column[:, None] * own[None, :]
    return writes


@triton.jit
def _read_state(
    queries, query_row, keys, key_row, matrix, kept_keys, row, place, real, value_at, in_value,
    is_delta: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, block_keys: tl.constexpr,
    block_values: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Reads the state with a block's queries and keys, [B, C] each, and multiplies them by the block's keys, [B, B] each.

    What keys read, and their products, are zero unless `is_delta`. Keeps the keys.
    """
    read = tl.zeros([block_rows, block_values], tl.float32)
    removed = tl.zeros([block_rows, block_values], tl.float32)
    by_query = tl.zeros([block_rows, block_rows], tl.float32)
    by_key = tl.zeros([block_rows, block_rows], tl.float32)
    for start in range(0, key_dim, block_keys):
        key_at = start + tl.arange(0, block_keys)
        in_key = key_at < key_dim
        q = _tile(queries, row, query_row, key_at, real, in_key)
        k = _tile(keys, row, key_row, key_at, real, in_key)
        state = _tile(matrix, key_at, value_dim, value_at, in_key, in_value)
        read = tl.dot(q, state, read, input_precision=PRECISION)
        by_query = tl.dot(q, tl.trans(k), by_query, input_precision=PRECISION)
        if is_delta:
            removed = tl.dot(k, state, removed, input_precision=PRECISION)
            by_key = tl.dot(k, tl.trans(k), by_key, input_precision=PRECISION)
        if tl.program_id(2) == 0:
            tl.store(kept_keys + place[:, None] * key_dim + key_at[None, :], k, real[:, None] & in_key[None, :])
    return read, removed, by_query, by_key


@triton.jit
def _products(
    queries, query_row, keys, key_row, row, real, row_before, real_before,
    is_delta: tl.constexpr, key_dim: tl.constexpr, block_keys: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Products of a block's queries, and if `is_delta` of its keys, with the keys of an earlier block, [B, B] each."""
    by_query = tl.zeros([block_rows, block_rows], tl.float32)
    by_key = tl.zeros([block_rows, block_rows], tl.float32)
    for start in range(0, key_dim, block_keys):
        key_at = start + tl.arange(0, block_keys)
        in_key = key_at < key_dim
        k_before = tl.trans(_tile(keys, row_before, key_row, key_at, real_before, in_key))
        q = _tile(queries, row, query_row, key_at, real, in_key)
        by_query = tl.dot(q, k_before, by_query, input_precision=PRECISION)
        if is_delta:
            k = _tile(keys, row, key_row, key_at, real, in_key)
            by_key = tl.dot(k, k_before, by_key, input_precision=PRECISION)
    return by_query, by_key


@triton.jit
def _read_earlier(
    queries, query_row, keys, key_row, decays, decay_row, kept_writes, rows,
    first, begin, row, place, real, count, total, value_at, in_value, read, u,
    is_delta: tl.constexpr, size: tl.constexpr, padded_rows: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    block_keys: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Adds what a block reads of the writes of earlier blocks to `read`, and subtracts it from the block's own writes `u`."""
    for before in range(0, begin, block_rows):
        member = before + tl.arange(0, block_rows)
        by_query, by_key = _products(
            queries, query_row, keys, key_row, row, real, first + member, member < count,
            is_delta, key_dim, block_keys, block_rows,
        )  # fmt: skip
        u_before = _tile(kept_writes, member, value_dim, value_at, member < count, in_value)
        others = _path_decays(decays, decay_row, rows, first, member, count, size, padded_rows)
        weights = _weights(rows, first, place, member, count, total, others, size)
        read = tl.dot(by_query * weights, u_before, read, input_precision=PRECISION)
        if is_delta:
            u -= tl.dot(by_key * weights, u_before, input_precision=PRECISION)
    return read, u


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
    decays, decay_head, decay_row,  # float32 [H, N]
    beta, beta_head, beta_row,  # float32 [H, N]; unused without is_delta
    out,  # float32 [N, H, value_dim], contiguous; zero for rows without a stream
    rows, streams, layer,  # int64 tables of `DeviceStates`, and the layer's number
    is_delta: tl.constexpr, size: tl.constexpr,
    most_rows: tl.constexpr, padded_rows: tl.constexpr,  # of a stream's buffers, and a power of two
    key_dim: tl.constexpr, value_dim: tl.constexpr,
    block_keys: tl.constexpr, block_values: tl.constexpr, block_rows: tl.constexpr,
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
        matrix = _buffer(streams, MATRICES, stream, tl.float32, size) + at * key_dim * value_dim
        kept_keys = _buffer(streams, KEYS, stream, tl.float32, size) + at * most_rows * key_dim
        kept_writes = _buffer(streams, WRITES, stream, tl.float32, size) + at * most_rows * value_dim
        kept_decays = _buffer(streams, DECAYS, stream, tl.float32, size) + at * most_rows
        own_queries, own_keys, own_decays = queries + head * query_head, keys + head * key_head, decays + head * decay_head
        for begin in range(0, count, block_rows):
            place = begin + tl.arange(0, block_rows)
            row, real = first + place, place < count
            total = _path_decays(own_decays, decay_row, rows, first, place, count, size, padded_rows)
            read, removed, by_query, by_key = _read_state(
                own_queries, query_row, own_keys, key_row, matrix, kept_keys, row, place, real, value_at, in_value,
                is_delta, key_dim, value_dim, block_keys, block_values, block_rows,
            )  # fmt: skip
            read *= tl.exp(total)[:, None]
            u = _tile(values + head * value_head, row, value_row, value_at, real, in_value) - removed * tl.exp(total)[:, None]
            read, u = _read_earlier(
                own_queries, query_row, own_keys, key_row, own_decays, decay_row, kept_writes, rows,
                first, begin, row, place, real, count, total, value_at, in_value, read, u,
                is_delta, size, padded_rows, key_dim, value_dim, block_keys, block_rows,
            )  # fmt: skip
            weights = _weights(rows, first, place, place, count, total, total, size)
            if is_delta:
                b = tl.load(beta + head * beta_head + row * beta_row, real, 0.0)[:, None]
                u = _solved(u * b, by_key * weights * b, block_rows)
            read = tl.dot(by_query * weights, u, read, input_precision=PRECISION)
            to_values = real[:, None] & in_value[None, :]
            tl.store(out + (row[:, None] * heads + head) * value_dim + value_at[None, :], read, to_values)
            tl.store(kept_writes + place[:, None] * value_dim + value_at[None, :], u, to_values)
            if tl.program_id(2) == 0:
                tl.store(kept_decays + place, tl.load(own_decays + row * decay_row, real, 0.0), real)
            tl.debug_barrier()  # the next block reads the writes in other threads


@triton.jit(do_not_specialize=["layer"])
def convolve(
    inputs,  # [N, channels]
    input_row,  # stride between rows
    input_channel,  # stride between channels
    weight,  # [channels, window + 1]
    weight_channel,  # stride between channels
    weight_tap,
    bias,  # [channels]; unused without has_bias
    out,  # float32 [N, channels], contiguous; zero for rows without a stream
    rows,  # int64, of `DeviceStates`
    streams,  # int64
    layer,
    has_bias: tl.constexpr,
    size: tl.constexpr,
    most_rows: tl.constexpr,
    words: tl.constexpr,  # of a row's path
    window: tl.constexpr,
    channels: tl.constexpr,
    block: tl.constexpr,
):
    """The convolution of one row over some channels; keeps the row's inputs."""
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    stream = tl.load(rows + STREAM * size + row)
    summed = tl.zeros([block], tl.float32)
    if stream >= 0:
        first = tl.load(streams + FIRST_ROW * size + stream)
        kept = _buffer(streams, INPUTS, stream, inputs.dtype.element_ty, size)
        kept += layer.to(tl.int64) * (window + most_rows) * channels
        if has_bias:
            summed = tl.load(bias + at, inside, 0.0).to(tl.float32)
        for tap in range(window + 1):
            place = tl.load(rows + (PATH + words + tap) * size + row) + tl.zeros([block], tl.int64)
            of_row = inputs + (first + place - window) * input_row + at * input_channel
            before = tl.load(kept + place * channels + at, inside & (place < window), 0.0).to(tl.float32)
            own = tl.load(of_row, inside & (place >= window), 0.0).to(tl.float32)
            summed += (before + own) * tl.load(weight + at * weight_channel + tap * weight_tap, inside, 0.0).to(tl.float32)
        own = tl.load(inputs + row * input_row + at * input_channel, inside, 0.0)
        tl.store(kept + (window + row - first) * channels + at, own, inside)
    tl.store(out + row * channels + at, summed, inside)


@triton.jit
def fold(
    streams,  # int64, of `DeviceStates`
    size: tl.constexpr,
    most_rows: tl.constexpr,
    key_dim: tl.constexpr,
    padded_key: tl.constexpr,
    value_dim: tl.constexpr,
    block_values: tl.constexpr,
):
    """Replaces a stream's state of one layer and head by the one after its first FOLDED rows, some of its columns."""
    stream, at = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(streams + FOLDED * size + stream).to(tl.int32)
    if count > 0:
        key_at, value_at = tl.arange(0, padded_key), tl.program_id(2) * block_values + tl.arange(0, block_values)
        in_key, in_value = key_at < key_dim, value_at < value_dim
        mask = in_key[:, None] & in_value[None, :]
        target = _buffer(streams, MATRICES, stream, tl.float32, size) + at * key_dim * value_dim
        target += key_at[:, None] * value_dim + value_at[None, :]
        keys = _buffer(streams, KEYS, stream, tl.float32, size) + at * most_rows * key_dim
        writes = _buffer(streams, WRITES, stream, tl.float32, size) + at * most_rows * value_dim
        decays = _buffer(streams, DECAYS, stream, tl.float32, size) + at * most_rows
        state = tl.load(target, mask, 0.0)
        for row in range(count):
            key = tl.load(keys + row * key_dim + key_at, in_key, 0.0)
            write = tl.load(writes + row * value_dim + value_at, in_value, 0.0)
            state = state * tl.exp(tl.load(decays + row)) + key[:, None] * write[None, :]
        tl.store(target, state, mask)


@triton.jit
def shift(
    streams,  # int64, of `DeviceStates`
    itemsize: tl.constexpr,  # of the inputs: 2 or 4 bytes, which are moved as they are
    size: tl.constexpr,
    most_rows: tl.constexpr,
    window: tl.constexpr,
    channels: tl.constexpr,
    block: tl.constexpr,
):
    """Moves the window of one layer's convolution in a stream behind its first FOLDED rows, some channels of it."""
    stream, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(streams + FOLDED * size + stream)
    if count > 0:
        at = tl.program_id(2) * block + tl.arange(0, block)
        kind: tl.constexpr = tl.int16 if itemsize == 2 else tl.int32
        kept = _buffer(streams, INPUTS, stream, kind, size) + layer * (window + most_rows) * channels + at
        for place in range(window):  # a thread has the same channels in each turn, so none reads what another has moved
            tl.store(kept + place * channels, tl.load(kept + (count + place) * channels, at < channels), at < channels)
