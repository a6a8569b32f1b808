"""Triton kernels that choose a token of each row of logits, by filters and the keyed draw of its request.

The rules are those of `outrider.verify.sampling.sampler`, which is the reference. Few tokens of a row can be chosen, so the
programs of all blocks first collect those (`weigh` and `keep`), and then one program for each row chooses among them:

- Top-k and top-p keep a row's largest logits. The blocks' programs sum how many tokens, and which mass, lie within each of some
  distances from the largest logit. Those within the first distance that suffices are collected.
- Without filters, the tokens of the best scores are among each block's best, up to rounding.

If there is no room for them, the program reads the whole row instead. Its filters keep the logits up to a border: the tokens
above it, and of those at it the first ones. It is found bit by bit, by sums over the tokens.

Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.ranking_kernels import keys_of, read_logits

# The fields of a row's settings, int64 [SETTINGS, M]; fractions are the bits of float64. A row of temperature 0 is left out.
KEY, TEMPERATURE, TOP_K, TOP_P, LEAST_WEIGHT = map(tl.constexpr, range(5))
# As in `outrider.verify.sampling.sampler`.
MASS_SCALE, SCORE_ROUNDING = tl.constexpr(2.0**32), tl.constexpr(1e-3)
MOST_BITS = tl.constexpr((1 << 53) - 1)
# Below all scores.
LOWEST = tl.constexpr(-3e38)
# The distances from the largest log-weight, of which the last is infinite. For each, a number has the mass of a block's tokens
# within it, and above it their number.
LEVELS, COUNT_SHIFT = tl.constexpr(8), tl.constexpr(48)


@triton.jit
def _setting(settings, field: tl.constexpr, row):
    return tl.load(settings + field * tl.num_programs(0) + row)


@triton.jit
def _fraction(settings, field: tl.constexpr, row):
    return _setting(settings, field, row).to(tl.float64, bitcast=True)


@triton.jit
def _largest(values, row, blocks, most: tl.constexpr, most_blocks: tl.constexpr):
    """The row's largest logit, by the blocks' largest."""
    number = tl.arange(0, most_blocks)
    return tl.max(tl.load(values + (row * blocks + number) * most, number < blocks, -float("inf")), 0)


@triton.jit
def _masses(logits, largest, temperature):
    """The probabilities of tokens as int64, up to a common factor; none of a logit that is not finite."""
    weights = tl.div_rn(logits - largest, temperature)
    return tl.where(weights <= 0.0, tl.exp(weights) * MASS_SCALE, 0.0).to(tl.int64)


@triton.jit
def _is_within(weights, level):
    """Whether log-weights lie within the distance of a level: 0.5, 1.5, 3, 5, 7.5, 10.5, 14, or any."""
    return (weights >= (level + 1) * (level + 2) * -0.25) | (level == LEVELS - 1)


@triton.jit
def _needed(mass, top_p):
    """The mass that precedes the first token dropped."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def _mass_before(row, count, border, largest, temperature, is_count: tl.constexpr, low_bits: tl.constexpr, block: tl.constexpr):
    """The mass of the logits whose key is below `border`, of `count` logits from `row` on; their number with `is_count`."""
    total = tl.zeros([block], tl.int64)
    for begin in range(0, count, block):
        logits, at = read_logits(row, begin, count, block)
        before = (keys_of(logits, low_bits) < border) & (at < count)
        mass = tl.full([block], 1, tl.int64) if is_count else _masses(logits, largest, temperature)
        total += tl.where(before, mass, 0)
    return tl.sum(total, 0)


@triton.jit
def _border(
    row, count, needed, limit, rest, largest, temperature,
    is_count: tl.constexpr, low_bits: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The key at which a mass of `needed` is reached, and the mass before it.

    Of keys from `limit` on, only a mass of `rest` counts, which is at `limit`.
    """
    border = tl.full([], 0, tl.int64)
    before = tl.full([], 0, tl.int64)
    for place in range(32 - low_bits):
        tried = border | (tl.full([], 1, tl.int64) << (31 - low_bits - place))
        mass = _mass_before(row, count, tl.minimum(tried, limit), largest, temperature, is_count, low_bits, block)
        mass += tl.where(tried > limit, rest, 0)
        border = tl.where(mass < needed, tried, border)
        before = tl.where(mass < needed, mass, before)
    return border, before


@triton.jit
def _tie_mass(row, count, border, largest, temperature, low_bits: tl.constexpr, block: tl.constexpr):
    """The mass of each token whose key is `border`; 0 without one."""
    found = tl.zeros([block], tl.int64)
    for begin in range(0, count, block):
        logits, at = read_logits(row, begin, count, block)
        at_border = (keys_of(logits, low_bits) == border) & (at < count)
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
def _below_one(bits):
    """1 - u for the uniform numbers u of these bits, float32, to within its rounding also where it is small."""
    return (bits.to(tl.int64) ^ MOST_BITS).to(tl.float32) * 2.0**-53


@triton.jit
def _rough_noise(bits):
    """The Gumbel noise of these bits, float32, to within a tenth of SCORE_ROUNDING."""
    rest = _below_one(bits)
    of_small = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * (0.25 + rest * 0.2))))  # -log(1 - x), by its series
    minus_log = tl.where(rest < 0.0625, of_small, -tl.log((bits.to(tl.float32) + 0.5) * 2.0**-53))
    return -tl.log(tl.maximum(minus_log, 2.0**-54))


@triton.jit
def _has_filters(settings, row):
    return (_setting(settings, TOP_K, row) > 0) | (_fraction(settings, TOP_P, row) < 1.0)


@triton.jit
def weigh(
    logits,  # [M, V]
    row_stride,
    settings,
    values,  # float32 [M, blocks, most], of `ranking_kernels.likeliest_of_block`
    masses,  # int64 [M, blocks, LEVELS]
    vocabulary,
    draws: tl.constexpr,  # tokens of each row
    most: tl.constexpr,
    most_blocks: tl.constexpr,  # a power of two
    block: tl.constexpr,
):
    """Mass and number of one block's tokens within each distance, if the row has filters, or several tokens are drawn."""
    row, number, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature = _fraction(settings, TEMPERATURE, row).to(tl.float32)
    if _has_filters(settings, row) | ((draws > 1) & (temperature > 0.0)):
        largest = _largest(values, row, blocks, most, most_blocks)
        found, token = read_logits(logits + row.to(tl.int64) * row_stride, number * block, vocabulary, block)
        weights = tl.div_rn(found - largest, temperature)
        of_token = _masses(found, largest, temperature) + (tl.full([], 1, tl.int64) << COUNT_SHIFT)
        of_token = tl.where(token < vocabulary, of_token, 0)
        for level in range(LEVELS):
            within = tl.where(_is_within(weights, level), of_token, 0)
            tl.store(masses + (row * blocks + number) * LEVELS + level, tl.sum(within, 0))


@triton.jit
def _level(row, settings, masses, blocks, number, most_blocks: tl.constexpr):
    """Of a row with filters: the level at which its tokens are collected, their number, that in the blocks before the block
    `number`, and the mass of the row.
    """
    block, level = tl.arange(0, most_blocks)[:, None], tl.arange(0, LEVELS)[None, :]
    packed = tl.load(masses + (row * blocks + block) * LEVELS + level, (block < blocks) & (level < LEVELS), 0)
    counts, mass = packed >> COUNT_SHIFT, tl.sum(packed & ((tl.full([], 1, tl.int64) << COUNT_SHIFT) - 1), 0)
    of_row = tl.max(mass, 0)
    top_k = _setting(settings, TOP_K, row)
    suffices = mass >= _needed(of_row, _fraction(settings, TOP_P, row))
    if top_k > 0:
        suffices = tl.sum(counts, 0) >= top_k
    chosen = tl.min(tl.where(suffices, tl.arange(0, LEVELS), LEVELS - 1), 0)
    at_level = tl.sum(tl.where(level == chosen, counts, 0), 1)
    before = tl.sum(tl.where(tl.arange(0, most_blocks) < number, at_level, 0), 0)
    return chosen, tl.sum(at_level, 0), before, of_row


@triton.jit
def keep(
    logits, row_stride, settings, values, masses,  # as of `weigh`
    kept,  # [M, room] of the logits' type
    ids,  # int32 [M, room]
    vocabulary,
    room,  # SLOTS for each block at least
    draws: tl.constexpr,
    most: tl.constexpr, most_blocks: tl.constexpr, low_bits: tl.constexpr, block: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """Collects the tokens of one block of one row that can be chosen, by their ids.

    Without filters, each block has `slots`, more than `draws`, and -inf behind its tokens. There are more tokens only if as
    many scores are as good as equal, which does not happen.
    """
    row, number, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature = _fraction(settings, TEMPERATURE, row).to(tl.float32)
    if temperature > 0.0:
        found, token = read_logits(logits + row.to(tl.int64) * row_stride, number * block, vocabulary, block)
        weights = tl.div_rn(found - _largest(values, row, blocks, most, most_blocks), temperature)
        first = (number * slots).to(tl.int64)
        if _has_filters(settings, row):
            level, _, first, _ = _level(row, settings, masses, blocks, number, most_blocks)
            can_be_chosen = _is_within(weights, level) & (token < vocabulary)
        else:
            allowed = (weights >= _fraction(settings, LEAST_WEIGHT, row).to(tl.float32)) & (weights > -float("inf"))
            scores = weights + _rough_noise(_random_bits(_setting(settings, KEY, row), token))
            scores = tl.where(allowed, scores, LOWEST)
            least, left = tl.max(scores, 0), scores
            for _drawn in range(draws - 1):
                left = tl.where(left >= least, LOWEST, left)
                least = tl.max(left, 0)
            can_be_chosen = allowed & (scores >= least - SCORE_ROUNDING)
            empty = tl.full([slots], -float("inf"), tl.float32).to(kept.dtype.element_ty)
            tl.store(kept + row * room + first + tl.arange(0, slots), empty)
            tl.debug_barrier()  # all slots are empty before some are filled
        place = first + tl.cumsum(can_be_chosen.to(tl.int32), 0) - 1
        last = tl.where(_has_filters(settings, row), room, first + slots)
        fits = can_be_chosen & (place >= 0) & (place < last)
        tl.store(kept + row * room + place, found.to(kept.dtype.element_ty), fits)
        tl.store(ids + row * room + place, token, fits)


@triton.jit
def _draw(
    row, count, ids, has_ids, key, border, ties, largest, temperature, least_weight, last_score, last_token,
    low_bits: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The best score among the tokens before `border`, the first `ties` at it, and of at least a weight; the token; its weight.

    Only tokens count that follow the last one by their scores, and at equal ones by their ids.
    """
    best, choice, weight = tl.full([], LOWEST, tl.float32), tl.full([], 0, tl.int32), tl.full([], LOWEST, tl.float32)
    passed = tl.full([], 0, tl.int64)  # tokens at the border
    for begin in range(0, count, block):
        logits, at = read_logits(row, begin, count, block)
        keys, weights = keys_of(logits, low_bits), tl.div_rn(logits - largest, temperature)
        at_border = ((keys == border) & (at < count)).to(tl.int64)
        kept = (keys < border) | ((at_border > 0) & (passed + tl.cumsum(at_border, 0) <= ties))
        passed += tl.sum(at_border, 0)
        kept = kept & (at < count) & (weights >= least_weight) & (weights > -float("inf"))
        token = tl.where(has_ids, tl.load(ids + at, has_ids & (at < count), 0), at)
        bits = _random_bits(key, token)
        # A score exceeds the best one only if 1 - u is at most exp(weight - best), which few tokens pass.
        kept = kept & (_below_one(bits) <= tl.exp(tl.minimum(weights - (best - SCORE_ROUNDING), 0.0)))
        if tl.max(kept.to(tl.int32), 0) > 0:
            uniform = (bits.to(tl.float64) + 0.5) * 2.0**-53
            noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
            scores = tl.where(kept, weights + noise, -float("inf"))
            follows = (scores < last_score) | ((scores == last_score) & (token > last_token))
            scores = tl.where(follows, scores, -float("inf"))
            score = tl.max(scores, 0)
            if score > best:
                best, choice = score, tl.min(tl.where(scores == score, token, 0x7FFFFFFF), 0)
                weight = tl.max(tl.where((scores == score) & (token == choice), weights, LOWEST), 0)
    return best, choice, weight


@triton.jit
def _filters(
    row, count, settings, index, total, largest, temperature, low_bits: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """The border of the tokens that top-k and top-p keep, and how many at it; `total` is the row's mass without top-k."""
    top_k, top_p = _setting(settings, TOP_K, index), _fraction(settings, TOP_P, index)
    border = tl.full([], 1, tl.int64) << 32  # after all keys
    before, ties, rest = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if top_k > 0:
        border, before = _border(row, count, top_k, border, rest, largest, temperature, True, low_bits, block)
        ties = top_k - before
    if top_p < 1.0:
        if top_k > 0:
            at_border = (
                _mass_before(row, count, border + 1, largest, temperature, True, low_bits, block) - before
            )  # fewer than `ties` if the row has less than `top_k` tokens
            rest = tl.minimum(ties, at_border) * _tie_mass(row, count, border, largest, temperature, low_bits, block)
            total = rest + _mass_before(row, count, border, largest, temperature, False, low_bits, block)
        needed = _needed(total, top_p)
        inner, passed = _border(row, count, needed, border, rest, largest, temperature, False, low_bits, block)
        mass = tl.maximum(_tie_mass(row, count, inner, largest, temperature, low_bits, block), 1)
        most_ties = (needed - passed + mass - 1) // mass
        ties = tl.where(inner == border, tl.minimum(ties, most_ties), most_ties)
        border = inner
    return border, ties


@triton.jit
def choose(
    logits, row_stride, settings, values, masses, kept, ids,  # as of `keep`
    chosen,  # int32 [M, draws]; rows of temperature 0 are left as they are
    probabilities,  # float32 [M, draws], if several tokens are drawn; min-p excludes none from their sum
    vocabulary,
    room,
    blocks,
    draws: tl.constexpr,
    most: tl.constexpr, most_blocks: tl.constexpr, low_bits: tl.constexpr, block: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """The tokens of one row, the best score first."""
    index = tl.program_id(0)
    temperature = _fraction(settings, TEMPERATURE, index).to(tl.float32)
    if temperature > 0.0:
        largest = _largest(values, index, blocks, most, most_blocks)
        border, ties = tl.full([], 1, tl.int64) << 32, tl.full([], 0, tl.int64)  # after all keys
        row, count, fits = kept + index.to(tl.int64) * room, blocks * slots, True
        number, mass = tl.full([], 0, tl.int64), tl.full([], 1, tl.int64)
        if _has_filters(settings, index) | (draws > 1):
            _, number, _, mass = _level(index, settings, masses, blocks, 0, most_blocks)
        if _has_filters(settings, index):
            fits = (number >= 0) & (number <= room)
            if fits:
                count = number.to(tl.int32)
            else:
                row, count = logits + index.to(tl.int64) * row_stride, vocabulary
            border, ties = _filters(row, count, settings, index, mass, largest, temperature, low_bits, block)
            if draws > 1:
                mass = _mass_before(row, count, border, largest, temperature, False, low_bits, block)
                mass += ties * _tie_mass(row, count, border, largest, temperature, low_bits, block)
        least_weight = _fraction(settings, LEAST_WEIGHT, index).to(tl.float32)
        score, choice = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
        for drawn in range(draws):
            score, choice, weight = _draw(
                row, count, ids + index * room, fits, _setting(settings, KEY, index), border, ties, largest, temperature,
                least_weight, score, choice, low_bits, block,
            )  # fmt: skip
            tl.store(chosen + index * draws + drawn, choice)
            if draws > 1:
                tl.store(probabilities + index * draws + drawn, tl.exp(weight) * MASS_SCALE / mass.to(tl.float32))
