"""Triton kernels over logits: the likeliest tokens of each row, and a choice among them by filters and the keyed draw.

The rules are those of `outrider.verify.sampling.largest` and `outrider.verify.sampling.sampler`, which are the references. To
choose, a program has one row. Filters keep a row's largest logits, so each is a border: tokens above it are kept, and of those
at it the first ones. A border is found bit by bit, by sums over the row, which the caches hold after the first time. Triton is
an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As in `outrider.verify.sampling.sampler`.
MASS_SCALE, SCORE_ROUNDING = tl.constexpr(2.0**32), tl.constexpr(1e-3)
MOST_BITS = tl.constexpr((1 << 53) - 1)
# Below all scores.
LOWEST = tl.constexpr(-3e38)


@triton.jit
def _logits(row, begin, vocabulary, block: tl.constexpr):
    """A block of a row, float32, and its token ids; -inf after the last."""
    token = begin + tl.arange(0, block)
    return tl.load(row + token, token < vocabulary, -float("inf")).to(tl.float32), token


@triton.jit
def _keys(logits, low_bits: tl.constexpr):
    """Whole numbers that order logits, the largest first. The low bits of a narrower type add nothing."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)) >> low_bits


@triton.jit
def _masses(logits, largest, temperature):
    """The probabilities of tokens as int64, up to a common factor."""
    return (tl.exp(tl.div_rn(logits - largest, temperature)) * MASS_SCALE).to(tl.int64)


@triton.jit
def _mass_before(
    row, vocabulary, border, largest, temperature, is_count: tl.constexpr, low_bits: tl.constexpr, block: tl.constexpr
):
    """The mass of the tokens whose key is below `border`; their number with `is_count`."""
    total = tl.zeros([block], tl.int64)
    for begin in range(0, vocabulary, block):
        logits, token = _logits(row, begin, vocabulary, block)
        before = (_keys(logits, low_bits) < border) & (token < vocabulary)
        mass = tl.full([block], 1, tl.int64) if is_count else _masses(logits, largest, temperature)
        total += tl.where(before, mass, 0)
    return tl.sum(total, 0)


@triton.jit
def _border(
    row, vocabulary, needed, limit, rest, largest, temperature,
    is_count: tl.constexpr, low_bits: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The key at which a mass of `needed` is reached, and the mass before it.

    Of keys from `limit` on, only a mass of `rest` counts, which is at `limit`.
    """
    border = tl.full([], 0, tl.int64)
    before = tl.full([], 0, tl.int64)
    for place in range(32 - low_bits):
        tried = border | (tl.full([], 1, tl.int64) << (31 - low_bits - place))
        mass = _mass_before(row, vocabulary, tl.minimum(tried, limit), largest, temperature, is_count, low_bits, block)
        mass += tl.where(tried > limit, rest, 0)
        border = tl.where(mass < needed, tried, border)
        before = tl.where(mass < needed, mass, before)
    return border, before


@triton.jit
def _tie_mass(row, vocabulary, border, largest, temperature, low_bits: tl.constexpr, block: tl.constexpr):
    """The mass of each token whose key is `border`; 0 without one."""
    found = tl.zeros([block], tl.int64)
    for begin in range(0, vocabulary, block):
        logits, token = _logits(row, begin, vocabulary, block)
        at_border = (_keys(logits, low_bits) == border) & (token < vocabulary)
        found = tl.maximum(found, tl.where(at_border, _masses(logits, largest, temperature), 0))
    return tl.max(found, 0)


@triton.jit
def _random_bits(key, token):
    """53 random bits of each token, uint64: splitmix64 of the position's key and the token."""
    x = token.to(tl.uint64) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64) + key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return (x ^ (x >> 31)) >> 11


@triton.jit
def _draw(row, vocabulary, key, border, ties, largest, temperature, least_weight, low_bits: tl.constexpr, block: tl.constexpr):
    """The token with the best score among those before `border`, the first `ties` at it, and of at least a weight."""
    best, choice = tl.full([], LOWEST, tl.float32), tl.full([], 0, tl.int32)
    passed = tl.full([], 0, tl.int64)  # tokens at the border
    for begin in range(0, vocabulary, block):
        logits, token = _logits(row, begin, vocabulary, block)
        keys, weights = _keys(logits, low_bits), tl.div_rn(logits - largest, temperature)
        at_border = ((keys == border) & (token < vocabulary)).to(tl.int64)
        kept = (keys < border) | ((at_border > 0) & (passed + tl.cumsum(at_border, 0) <= ties))
        passed += tl.sum(at_border, 0)
        kept = kept & (token < vocabulary) & (weights >= least_weight) & (weights > -float("inf"))
        bits = _random_bits(key, token)
        # A score exceeds the best one only if 1 - u is at most exp(weight - best), which few tokens pass.
        below_one = (bits.to(tl.int64) ^ MOST_BITS).to(tl.float32) * 2.0**-53
        kept = kept & (below_one <= tl.exp(tl.minimum(weights - (best - SCORE_ROUNDING), 0.0)))
        if tl.max(kept.to(tl.int32), 0) > 0:
            uniform = (bits.to(tl.float64) + 0.5) * 2.0**-53
            noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
            scores = tl.where(kept, weights + noise, -float("inf"))
            score = tl.max(scores, 0)
            if score > best:
                best, choice = score, begin + tl.argmax(scores, 0, tie_break_left=True)
    return choice


@triton.jit(do_not_specialize=["top_k", "top_p_bits"])
def choose(
    logits,  # [M, V]
    row_stride,
    keys,  # int64 [M], of `outrider.drafters.noise.position_key`
    chosen,  # int64 [M]
    vocabulary,
    temperature,
    top_k,
    top_p_bits,  # of a float64, since Triton passes numbers as float32
    least_weight,  # the logarithm of min-p; -inf = none
    has_top_k: tl.constexpr,
    has_top_p: tl.constexpr,
    low_bits: tl.constexpr,  # of float32, which are zero in the logits' type
    block: tl.constexpr,
):
    """The token of each row."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    most = tl.full([block], -float("inf"), tl.float32)
    for begin in range(0, vocabulary, block):
        most = tl.maximum(most, _logits(row, begin, vocabulary, block)[0])
    largest = tl.max(most, 0)
    border = tl.full([], 1, tl.int64) << 32  # after all keys
    ties = tl.full([], 0, tl.int64)
    rest = tl.full([], 0, tl.int64)
    if has_top_k:
        wanted = tl.full([], 0, tl.int64) + top_k
        border, before = _border(row, vocabulary, wanted, border, rest, largest, temperature, True, low_bits, block)
        ties = wanted - before
    if has_top_p:
        if has_top_k:
            at_border = (
                _mass_before(row, vocabulary, border + 1, largest, temperature, True, low_bits, block) - before
            )  # fewer than `ties` if the row has less than `top_k` tokens
            rest = tl.minimum(ties, at_border) * _tie_mass(row, vocabulary, border, largest, temperature, low_bits, block)
        total = rest + _mass_before(row, vocabulary, border, largest, temperature, False, low_bits, block)
        share = total.to(tl.float64) * (tl.full([], 0, tl.int64) + top_p_bits).to(tl.float64, bitcast=True)
        needed = tl.maximum(tl.ceil(share).to(tl.int64), 1)
        inner, before = _border(row, vocabulary, needed, border, rest, largest, temperature, False, low_bits, block)
        mass = tl.maximum(_tie_mass(row, vocabulary, inner, largest, temperature, low_bits, block), 1)
        most_ties = (needed - before + mass - 1) // mass
        ties = tl.where(inner == border, tl.minimum(ties, most_ties), most_ties)
        border = inner
    key = tl.load(keys + index)
    choice = _draw(row, vocabulary, key, border, ties, largest, temperature, least_weight, low_bits, block)
    tl.store(chosen + index, choice.to(tl.int64))


@triton.jit
def _top(values, index, count: tl.constexpr, most: tl.constexpr):
    """The `count` largest of `values` [N], the largest first and the first of equal ones: values and `index`, [most] each."""
    place = tl.arange(0, most)
    largest, found = tl.full([most], -float("inf"), tl.float32), tl.zeros([most], tl.int32)
    at = tl.arange(0, values.shape[0])
    for number in tl.static_range(count):
        value, first = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        largest = tl.where(place == number, value, largest)
        found = tl.where(place == number, tl.sum(tl.where(at == first, index, 0), 0), found)
        values = tl.where(at == first, -float("inf"), values)
    return largest, found


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
    block: tl.constexpr,
):
    """The likeliest tokens of one block of one row."""
    row, number = tl.program_id(0), tl.program_id(1)
    found, token = _logits(logits + row.to(tl.int64) * row_stride, number * block, vocabulary, block)
    largest, chosen = _top(found, token, count, most)
    place = row * tl.num_programs(1) + number
    base = tl.max(largest, 0)
    mass = tl.sum(tl.exp(found - tl.where(base == -float("inf"), 0.0, base)), 0)
    tl.store(masses + place, mass)
    tl.store(values + place * most + tl.arange(0, most), largest)
    tl.store(ids + place * most + tl.arange(0, most), chosen)


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
):
    """The likeliest tokens of one row among those of its blocks."""
    row = tl.program_id(0)
    at = tl.arange(0, most_blocks * most)
    inside = at < blocks * most
    candidates = tl.load(values + row * blocks * most + at, inside, -float("inf"))
    largest, found = _top(candidates, tl.load(ids + row * blocks * most + at, inside, 0), count, most)
    base = tl.max(largest, 0)
    number = tl.arange(0, most_blocks)
    bases = tl.load(values + (row * blocks + number) * most, number < blocks, -float("inf"))
    mass = tl.sum(tl.load(masses + row * blocks + number, number < blocks, 0.0) * tl.exp(bases - base), 0)
    place = tl.arange(0, most)
    tl.store(chosen + row * count + place, found, place < count)
    tl.store(probabilities + row * count + place, tl.exp(largest - base) / mass, place < count)
