"""Triton kernels that find the likeliest tokens of each row of logits, as `outrider.verify.sampling.topk` does.

A row is cut into blocks, whose largest logits are found first. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_logits(row, begin, vocabulary, block: tl.constexpr):
    """A block of a row, float32, and where it is in the row; -inf after the last."""
    at = begin + tl.arange(0, block)
    return tl.load(row + at, at < vocabulary, -float("inf")).to(tl.float32), at


@triton.jit
def keys_of(logits, low_bits: tl.constexpr):
    """Whole numbers that order logits, the largest first, int64. The low bits of a narrower type add nothing."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)) >> low_bits


@triton.jit
def _logits_of(keys, low_bits: tl.constexpr):
    ordered = 0x7FFFFFFF - ((keys << low_bits) | ((1 << low_bits) - 1))
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return ((bits >> low_bits) << low_bits).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _top(logits, count: tl.constexpr, most: tl.constexpr, low_bits: tl.constexpr):
    """The `count` largest of N logits, the largest first and the first of equal ones, and their places; [most] each."""
    size: tl.constexpr = logits.shape[0]
    # A key with a place behind it, so that one minimum finds both; in 32 bits if they fit.
    packed = keys_of(logits, low_bits) * size + tl.arange(0, size)
    last = tl.full([], (1 << 62) - 1, tl.int64)  # behind all
    if (size << (32 - low_bits)) <= (1 << 31):
        packed, last = packed.to(tl.int32), tl.full([], (1 << 31) - 1, tl.int32)
    number = tl.arange(0, most)
    found = tl.full([most], 0, tl.int64)
    for taken in tl.static_range(count):
        least = tl.min(packed, 0)
        found = tl.where(number == taken, least.to(tl.int64), found)
        packed = tl.where(packed == least, last, packed)
    return tl.where(number < count, _logits_of(found // size, low_bits), -float("inf")), (found % size).to(tl.int32)


@triton.jit
def likeliest_of_block(
    logits,  # [M, V]
    row_stride,
    values,  # float32 [M, blocks, most]; the block's largest
    ids,  # int32 [M, blocks, most]
    masses,  # float32 [M, blocks]; the sum of exp(logit - the block's largest)
    vocabulary,
    count: tl.constexpr,
    most: tl.constexpr,  # `count` at least, a power of two
    low_bits: tl.constexpr,  # of float32, which are zero in the logits' type
    block: tl.constexpr,
):
    row, number = tl.program_id(0), tl.program_id(1)
    found, _ = read_logits(logits + row.to(tl.int64) * row_stride, number * block, vocabulary, block)
    largest, chosen = _top(found, count, most, low_bits)
    place = row * tl.num_programs(1) + number
    base = tl.max(largest, 0)
    mass = tl.sum(tl.exp(found - tl.where(base == -float("inf"), 0.0, base)), 0)
    tl.store(masses + place, mass)
    tl.store(values + place * most + tl.arange(0, most), largest)
    # Behind a row's end is -inf, which precedes NaN with a sign.
    tl.store(ids + place * most + tl.arange(0, most), tl.minimum(number * block + chosen, vocabulary - 1))


@triton.jit
def likeliest(
    values,  # as of `likeliest_of_block`
    ids,
    masses,
    chosen,  # int32 [M, count]
    probabilities,  # float32 [M, count]
    blocks,
    count: tl.constexpr,
    most: tl.constexpr,
    most_blocks: tl.constexpr,  # a power of two
    low_bits: tl.constexpr,
):
    """The likeliest tokens of one row among its blocks' likeliest."""
    row = tl.program_id(0)
    at = tl.arange(0, most_blocks * most)
    candidates = tl.load(values + row * blocks * most + at, at < blocks * most, -float("inf"))
    largest, places = _top(candidates, count, most, low_bits)
    base = tl.max(largest, 0)
    number = tl.arange(0, most_blocks)
    bases = tl.load(values + (row * blocks + number) * most, number < blocks, -float("inf"))
    mass = tl.sum(tl.load(masses + row * blocks + number, number < blocks, 0.0) * tl.exp(bases - base), 0)
    place = tl.arange(0, most)
    found = tl.load(ids + row * blocks * most + places, (place < count) & (places < blocks * most), 0)
    tl.store(chosen + row * count + place, found, place < count)
    tl.store(probabilities + row * count + place, tl.exp(largest - base) / mass, place < count)
