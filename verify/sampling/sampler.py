"""The target's choice of token at a node: greedy, or sampling with keyed Gumbel noise.

Keyed sampling adds Gumbel noise, a function of (request seed, position, token), to the log-weights and takes the argmax: an
exact sample (Gumbel-max trick). The answer for a seed is therefore the same for any drafter, any budget and without drafts.

Inverse-CDF sampling with one uniform number per position would be exact, too, but rounding could move any of the vocabulary's
CDF boundaries across the number, which changes one token in a few thousand. With Gumbel noise only a near-tie of the two top
scores can.

Of equal logits and of equal scores, the smaller id ranks first. `warp_logits` and `Sampler.sample` process whole batches on any
device; `candidates` and `Sampler.choose` give the same tokens for one row on a CPU, and compute noise for few of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafters.noise import mix, position_key
from outrider.verify.errors import ModelError
from outrider.verify.model.cpu import native
from outrider.verify.model.transfer import to_device
from outrider.verify.sampling.largest import largest
from outrider.verify.sampling_params import SamplingParams

# This many noise values are computed at once. More would not fit into the CPU cache.
NOISE_NUMBERS = 1 << 16
# Masses are integers, so that their sums do not depend on the order.
MASS_SCALE = 2.0**32
# Up to this size, the noise of all tokens is computed, for several positions at once.
SMALL_VOCABULARY = 8192
# A few of the likeliest tokens are tried first, then more of them, then all.
FIRST_CANDIDATES = (64, 1024)
# float32 rounding changes a score by less than this.
SCORE_ROUNDING = 1e-3


def gumbel(seed: int, positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise at P positions, float32 [P, C] for token ids int64 [C]; equal on every device."""
    bits = _random_bits(seed, positions, tokens)
    return bits.double().add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_().float()


def uniform(seed: int, position: int, number: int) -> float:
    """A pseudo-random number in [0, 1) that depends only on the arguments."""
    return (mix(position_key(seed, position) ^ (number + 1)) >> 11) / (1 << 53)


def _random_bits(seed: int, positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """53 random bits for each of P positions and C tokens, int64 [P, C]: splitmix64 of (seed, position, token)."""
    keys = [_signed(position_key(seed, position)) for position in positions]
    x = tokens * _signed(0x9E3779B97F4A7C15) + to_device(torch.tensor(keys), tokens.device)[:, None]
    buffer = torch.empty_like(x)
    x ^= _shift(x, 30, buffer)
    x *= _signed(0xBF58476D1CE4E5B9)
    x ^= _shift(x, 27, buffer)
    x *= _signed(0x94D049BB133111EB)
    x ^= _shift(x, 31, buffer)
    return _shift(x, 11, buffer)


def _signed(x: int) -> int:
    """The int64 with the same bits; torch multiplies int64 modulo 2**64."""
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Logical right shift of int64 into `out`."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def warp_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Applies temperature, top-k, top-p and min-p in this order: logits [M, V] to log-weights, float32 [M, V].

    Their softmax is the distribution to sample from; excluded tokens get -inf. Sorts nothing, and waits for nothing on a GPU.
    """
    weights = _log_weights(logits, params)
    if params.top_k or params.top_p < 1.0:
        ranks = _ranks(logits)
        kept = torch.ones_like(ranks, dtype=torch.bool)
        if params.top_k:
            kept = _leading(ranks, torch.ones_like(ranks), torch.full_like(ranks[:, :1], params.top_k))
        if params.top_p < 1.0:
            mass = _masses(weights).masked_fill_(~kept, 0)
            kept &= _leading(ranks, mass, _share(mass.sum(-1, keepdim=True), params.top_p))
        weights = weights.masked_fill(~kept, -torch.inf)
    if params.min_p:
        weights = weights.masked_fill(weights < math.log(params.min_p), -torch.inf)
    return weights


def _ranks(logits: torch.Tensor) -> torch.Tensor:
    """Whole numbers that order float32 logits, the largest first: int64 below 2**32, equal for equal logits."""
    bits = (logits.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return 0x7FFFFFFF - (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()


def _leading(ranks: torch.Tensor, mass: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Whether the mass of the tokens that rank before a token is less than `needed` [M, 1]; bool [M, V].

    Of equal ranks, int64 [M, V], the smaller id is first. Two histograms, of the upper and of the lower 16 bits of the ranks,
    find the rank at which the mass, int64 [M, V], is reached.
    """
    before, border = torch.zeros_like(needed), torch.ones_like(ranks, dtype=torch.bool)
    kept = torch.zeros_like(border)
    for shift in (16, 0):
        digits = (ranks >> shift) & 0xFFFF
        histogram = mass.new_zeros(len(mass), 1 << 16).scatter_add_(1, digits, mass.masked_fill(~border, 0))
        reached = histogram.cumsum(-1)
        digit = torch.searchsorted(reached, needed - before).clamp_(max=0xFFFF)
        before = before + reached.gather(1, digit) - histogram.gather(1, digit)
        kept |= border & (digits < digit)
        border &= digits == digit
    ties = mass.masked_fill(~border, 0)
    return kept | border & (before + ties.cumsum(-1) - ties < needed)


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of one row [V] that `warp_logits` keeps: ids int64 [C], in any order, and their log-weights float32 [C]."""
    ids = largest(logits, params.top_k) if params.top_k else torch.arange(len(logits))
    values = logits[ids] if params.top_k else logits
    weights = _log_weights(values, params)
    if params.top_p < 1.0:
        kept = _nucleus(values, _masses(weights), params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p:
        kept = (weights >= math.log(params.min_p)).nonzero()[:, 0]
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _log_weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Applies the temperature. The maximum is 0, so that tiny temperatures do not overflow."""
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / params.temperature


def _masses(weights: torch.Tensor) -> torch.Tensor:
    """The tokens' probabilities as integers, int64, up to a common factor."""
    return weights.exp().mul_(MASS_SCALE).long()


def _share(mass: torch.Tensor, top_p: float) -> torch.Tensor:
    """The mass that precedes the first token dropped. At least 1: the likeliest token is kept at any `top_p`."""
    return (mass.double() * top_p).ceil().long().clamp(min=1)


def _nucleus(logits: torch.Tensor, mass: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the smallest set of top tokens whose masses, int64 [C], sum to `top_p` of all. `logits` [C] rank them."""
    needed = int(_share(mass.sum(), top_p))
    for count in FIRST_CANDIDATES:
        ids = largest(logits, count)
        before = mass[ids].cumsum(-1) - mass[ids]
        if len(ids) < count or int(before[-1]) >= needed:
            return ids[before < needed]
    return _leading(_ranks(logits)[None], mass[None], torch.tensor([[needed]]))[0].nonzero()[:, 0]


def contenders(logits: torch.Tensor, params: SamplingParams, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of one row [V] that can be chosen if no filter excludes any: ids int64 [C] and log-weights [C].

    With u the uniform number behind a token's noise, its score exceeds s only if -log(u) < exp(weight - s), and 1 - u is at
    most -log(u). So a comparison excludes nearly all tokens, with s the best score of the likeliest ones.
    """
    if native.can_read(logits):
        ids = native.contenders(logits, params.temperature, position_key(params.seed, position), SCORE_ROUNDING)
        return ids, (logits[ids] - logits.amax()) / params.temperature
    weights = _log_weights(logits, params)
    likeliest = largest(logits, FIRST_CANDIDATES[0])
    best = (weights[likeliest] + gumbel(params.seed, [position], likeliest)[0]).max()
    bits = _random_bits(params.seed, [position], torch.arange(len(logits)))[0]
    below_one = bits.neg_().add_((1 << 53) - 1).float().add_(0.5).mul_(2.0**-53)  # 1 - u
    ids = (below_one <= weights.sub(best - SCORE_ROUNDING).exp_()).nonzero()[:, 0]
    return ids, weights[ids]


def check_finite(largest: float | NDArray[np.floating[Any]]) -> None:
    """Raises ModelError unless the largest logit of each row is finite."""
    if not np.isfinite(largest).all():
        raise ModelError("The model computed NaN or infinite logits; set another model.dtype, such as bfloat16 or float32.")


class Sampler:
    """Chooses one request's tokens. Caches the noise of recent positions, which consecutive steps share."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._noise = torch.empty(0, 0)  # [P, V]; noise of the positions from `_first` on
        self._first = 0

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """The target's token at one node, from logits [V] on a CPU and the node's output position.

        Raises ModelError if the logits are not finite.
        """
        params = self._params
        if native.can_read(logits) and (params.greedy or not params.filters):
            temperature = 0.0 if params.greedy else params.temperature
            ids = native.contenders(logits, temperature, position_key(params.seed, position), SCORE_ROUNDING)
            if len(ids) == 1:
                return int(ids)
        check_finite(float(logits.amax(-1)))
        if params.greedy:
            return int(logits.max(-1).indices)  # three times faster than argmax in bfloat16
        if not params.filters and len(logits) <= SMALL_VOCABULARY:
            return int(self.scores(_log_weights(logits, params)[None], [position]).argmax())
        ids, weights = candidates(logits, params) if params.filters else contenders(logits, params, position)
        scores = weights + self._noise_of(position, ids, len(logits))
        return int(ids[scores == scores.max()].min())

    def _noise_of(self, position: int, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """The noise of some tokens, float32 [C]."""
        if vocabulary > SMALL_VOCABULARY:
            return gumbel(self._params.seed, [position], ids)[0]
        return self._cached([position], vocabulary, ids.device)[position - self._first, ids]

    def sample(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """`choose` for M nodes at once, on any device: int64 [M], from logits [M, V]."""
        if self._params.greedy:
            return logits.max(-1).indices
        if logits.device.type == "cuda":
            from outrider.verify.model.gpu import triton_sampling  # Triton is only needed on a GPU

            return triton_sampling.choose(logits, self._params, positions)
        return self.scores(warp_logits(logits, self._params), positions).argmax(-1)

    def scores(self, weights: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Log-weights [M, V] plus noise: the argmax is a sample, the top K are K samples without replacement."""
        noise = self._cached(positions, weights.shape[-1], weights.device)
        return weights + noise[to_device(torch.tensor(positions) - self._first, weights.device)]

    def _cached(self, positions: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
        """The noise of all tokens from position `_first` on, float32 [P, V], computed for several positions at once."""
        first, last = min(positions), max(positions)
        if first < self._first or last >= self._first + len(self._noise):
            cached = self._noise[first - self._first :] if first >= self._first else self._noise[:0]
            missing = range(first + len(cached), max(last + 1, first + NOISE_NUMBERS // vocabulary))
            noise = gumbel(self._params.seed, missing, torch.arange(vocabulary, device=device))
            self._noise, self._first = torch.cat([cached, noise]) if len(cached) else noise, first
        return self._noise
