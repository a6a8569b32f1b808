"""The target's choice of token at a node, on the host: greedy, or sampling with keyed Gumbel noise.

Keyed sampling adds Gumbel noise, a function of (request seed, position, token), to the log-weights and takes the argmax: an
exact sample (Gumbel-max trick). The answer for a seed is therefore the same for any drafter, any budget and without drafts.

Inverse-CDF sampling with one uniform number per position would be exact, too, but rounding could move any of the vocabulary's
CDF boundaries across the number, which changes one token in a few thousand. With Gumbel noise only a near-tie of the two top
scores can.

Of equal logits and of equal scores, the smaller id ranks first. `outrider.verify.sampling.device` gives the same tokens for
whole batches on a device; here, noise is computed for few of the tokens. Imports no torch.
"""

import math

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.noise import mix, position_key
from outrider.verify.model.cpu.native import sampling as compiled
from outrider.verify.sampling.precision import MASS_SCALE, check_finite
from outrider.verify.sampling.topk import largest
from outrider.verify.sampling_params import SamplingParams

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
# A few of the likeliest tokens are tried first, then more of them, then all.
FIRST_CANDIDATES = (64, 1024)
# float32 rounding changes a score by less than this.
SCORE_ROUNDING = 1e-3


def gumbel(seed: int, position: int, tokens: Ids) -> Floats:
    """Gumbel noise at a position for C token ids, [C]; equal on every device."""
    uniforms = (random_bits(seed, position, tokens) + 0.5) * 2.0**-53
    noise: Floats = (-np.log(-np.log(uniforms))).astype(np.float32)
    return noise


def uniform(seed: int, position: int, number: int) -> float:
    """A pseudo-random number in [0, 1) that depends only on the arguments."""
    return (mix(position_key(seed, position) ^ (number + 1)) >> 11) / (1 << 53)


def random_bits(seed: int, position: int, tokens: Ids) -> NDArray[np.uint64]:
    """53 random bits for each of C tokens, [C]: splitmix64 of (seed, position, token)."""
    x = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position_key(seed, position))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x >> np.uint64(11)


def candidates(logits: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """The tokens of one row [V] that temperature, top-k, top-p and min-p keep, in this order.

    Ids [C], in any order, and their log-weights [C], whose softmax is the distribution to sample from.
    """
    ids = largest(logits, params.top_k) if params.top_k else np.arange(len(logits))
    values = logits[ids] if params.top_k else logits
    weights = _log_weights(values, params)
    if params.top_p < 1.0:
        kept = _nucleus(values, _masses(weights), params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p:
        kept = np.flatnonzero(weights >= np.float32(math.log(params.min_p)))
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def distribution(logits: Floats, params: SamplingParams) -> NDArray[np.float64]:
    """The probabilities of one row's tokens [V]. Raises ModelError if the largest logit is not finite."""
    check_finite(float(logits.max()))
    ids, weights = candidates(logits, params)
    found = np.zeros(len(logits), np.float64)
    mass = np.exp(weights.astype(np.float64))
    found[ids] = mass / mass.sum()
    return found


def _log_weights(logits: Floats, params: SamplingParams) -> Floats:
    """Applies the temperature. The maximum is 0, so that tiny temperatures do not overflow."""
    weights: Floats = (logits - logits.max()) / np.float32(params.temperature)
    return weights


def _masses(weights: Floats) -> NDArray[np.int64]:
    """The tokens' probabilities as integers, up to a common factor."""
    return (np.exp(weights) * np.float32(MASS_SCALE)).astype(np.int64)


def _nucleus(logits: Floats, mass: NDArray[np.int64], top_p: float) -> Ids:
    """Indices of the smallest set of top tokens whose masses [C] sum to `top_p` of all. `logits` [C] rank them.

    At least one: the likeliest token is kept at any `top_p`.
    """
    needed = max(1, math.ceil(float(mass.sum()) * top_p))
    for count in (*FIRST_CANDIDATES, len(logits)):
        ids = largest(logits, count)
        before = mass[ids].cumsum() - mass[ids]
        if len(ids) < count or int(before[-1]) >= needed:
            break
    return ids[before < needed]


def contenders(logits: Floats, params: SamplingParams, position: int, count: int = 1) -> tuple[Ids, Floats]:
    """The tokens of one row [V] that can have one of the `count` best scores if no filter excludes any.

    Ids [C] and log-weights [C]. With u the uniform number behind a token's noise, its score exceeds s only if -log(u) <
    exp(weight - s), and 1 - u is at most -log(u). So a comparison excludes nearly all tokens, with s the `count`-th best score
    of the likeliest ones.
    """
    if count == 1 and compiled.can_read(logits):
        ids = compiled.contenders(logits, params.temperature, position_key(params.seed, position), SCORE_ROUNDING)
        return ids, (logits[ids] - logits.max()) / np.float32(params.temperature)
    weights = _log_weights(logits, params)
    likeliest = largest(logits, FIRST_CANDIDATES[0])
    scores = weights[likeliest] + gumbel(params.seed, position, likeliest)
    if len(scores) < count:
        return likeliest, weights[likeliest]
    best = np.partition(scores, -count)[-count]
    bits = random_bits(params.seed, position, np.arange(len(logits)))
    below_one = (((1 << 53) - 1 - bits).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-53)  # 1 - u
    ids = np.flatnonzero(below_one <= np.exp(weights - np.float32(best - SCORE_ROUNDING)))
    return ids, weights[ids]


def choose(logits: Floats, params: SamplingParams, position: int) -> int:
    """The target's token at one node, from logits [V] and the node's output position.

    Raises ModelError if the logits are not finite.
    """
    if compiled.can_read(logits) and (params.greedy or not params.filters):
        temperature = 0.0 if params.greedy else params.temperature
        ids = compiled.contenders(logits, temperature, position_key(params.seed, position), SCORE_ROUNDING)
        if len(ids) == 1:
            return int(ids[0])
    check_finite(float(logits.max()))
    if params.greedy:
        return int(logits.argmax())
    ids, weights = candidates(logits, params) if params.filters else contenders(logits, params, position)
    scores = weights + gumbel(params.seed, position, ids)
    return int(ids[scores == scores.max()].min())


def draw(logits: Floats, params: SamplingParams, position: int, count: int) -> tuple[Ids, Floats]:
    """The `count` tokens of one row [V] with the best scores, and their probabilities, [count]; 0 = there is no other token.

    So they are samples without replacement (Kool et al., arXiv 1903.06059).
    """
    if params.filters:
        ids, weights = candidates(logits, params)
        mass = np.exp(weights).sum()
    else:
        ids, weights = contenders(logits, params, position, count)
        mass = np.exp(_log_weights(logits, params)).sum()
    order = ids.argsort()  # of equal scores, the smaller id is first
    ids, weights = ids[order], weights[order]
    best = largest(weights + gumbel(params.seed, position, ids), count)
    tokens, shares = np.zeros(count, np.int64), np.zeros(count, np.float32)
    tokens[: len(best)], shares[: len(best)] = ids[best], np.exp(weights[best]) / mass
    return tokens, shares
