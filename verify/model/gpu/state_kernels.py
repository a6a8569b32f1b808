"""Triton kernels that keep what recurrent layers read: convolutions, and the commits of states.

Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Fields of a stream (`DeviceStates.streams`); tables have `size` columns. The last five are addresses of `RecurrentStates`.
FIRST_ROW, COUNT, FOLDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MATRICES, KEYS, WRITES = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
DECAYS, INPUTS = tl.constexpr(6), tl.constexpr(7)
# Fields of a row (`DeviceStates.rows`): its stream, and its path, whose words precede the places that a convolution reads.
STREAM, PATH = tl.constexpr(0), tl.constexpr(1)
WORD_BITS = tl.constexpr(64)


@triton.jit
def buffer_of(streams, field, stream, kind: tl.constexpr, size: tl.constexpr):
    """One of a stream's tensors. torch aligns them to 64 bytes or more."""
    return tl.multiple_of(tl.load(streams + field * size + stream).to(tl.pointer_type(kind)), 16)


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
        kept = buffer_of(streams, INPUTS, stream, inputs.dtype.element_ty, size)
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
    decay_dim: tl.constexpr,
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
        target = buffer_of(streams, MATRICES, stream, tl.float32, size) + at * key_dim * value_dim
        target += key_at[:, None] * value_dim + value_at[None, :]
        keys = buffer_of(streams, KEYS, stream, tl.float32, size) + at * most_rows * key_dim
        writes = buffer_of(streams, WRITES, stream, tl.float32, size) + at * most_rows * value_dim
        decays = buffer_of(streams, DECAYS, stream, tl.float32, size) + at * most_rows * decay_dim
        decays += key_at % decay_dim  # one of all channels, or its own
        state = tl.load(target, mask, 0.0)
        for row in range(count):
            key = tl.load(keys + row * key_dim + key_at, in_key, 0.0)
            write = tl.load(writes + row * value_dim + value_at, in_value, 0.0)
            decay = tl.load(decays + row * decay_dim, in_key, 0.0)
            state = state * tl.exp(decay)[:, None] + key[:, None] * write[None, :]
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
        kept = buffer_of(streams, INPUTS, stream, kind, size) + layer * (window + most_rows) * channels + at
        for place in range(window):  # a thread has the same channels in each turn, so none reads what another has moved
            tl.store(kept + place * channels, tl.load(kept + (count + place) * channels, at < channels), at < channels)
