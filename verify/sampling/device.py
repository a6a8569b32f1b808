"""Choices and rankings of whole batches of rows, by torch on their device. Only `distribution` waits for a GPU.

The same rules as in `outrider.verify.sampling.sampler`, which decides row by row on the host, with the same noise. Draft models
sample with it on a CPU, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafters.noise import position_key
from outrider.verify.model.transfer import Download, one_copy, to_device
from outrider.verify.sampling.precision import MASS_SCALE, check_finite
from outrider.verify.sampling.ranking import joined, ranked_together, ranking_of
from outrider.verify.sampling_params import SamplingParams

# This many noise values are computed at once. More would not fit into a CPU's cache.
NOISE_NUMBERS = 1 << 16


class DeviceArrays:
    """Tensors on a device. Implements `outrider.verify.sampling.rows.Arrays`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def of(self, array: NDArray[Any]) -> torch.Tensor:
        """See `Arrays`."""
        return to_device(torch.from_numpy(array), self._device)

    def masks(self, allowed: NDArray[np.bool_]) -> torch.Tensor:
        """See `Arrays`. Masks travel to the device in packed form: one bit per token."""
        packed = self.of(np.packbits(allowed, 1, bitorder="little"))
        bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=self._device) & 1
        return bits.flatten(1)[:, : allowed.shape[1]].bool()

    def float32(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Arrays`."""
        return logits.to(torch.float32, copy=True)

    def where(self, condition: torch.Tensor, this: Any, other: Any) -> torch.Tensor:
        """See `Arrays`."""
        return torch.where(condition, this, other)

    def largest(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Arrays`."""
        return logits.amax(-1, keepdim=True)


def gumbel(seed: int, positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise at P positions, float32 [P, C] for token ids int64 [C]; equal on every device."""
    bits = _random_bits(seed, positions, tokens)
    return bits.double().add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_().float()


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


class DeviceSampler:
    """Chooses one request's tokens. Caches the noise of recent positions, which consecutive steps share."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._noise = torch.empty(0, 0)  # [P, V]; noise of the positions from `_first` on
        self._first = 0

    def sample(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """The tokens of M nodes, int64 [M], from logits [M, V]."""
        if self._params.greedy:
            return logits.max(-1).indices
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


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row of logits [M, V]: int32 ids and float32 probabilities, [M, count]."""
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int32), torch.empty(len(logits), 0)
    if logits.device.type != "cuda":
        probabilities, ids = logits.softmax(-1, torch.float32).topk(min(count, logits.shape[1]), -1)
        return ids.int(), probabilities
    return ranking_of(logits).of(logits, count)


def choices(logits: torch.Tensor, params: SamplingParams, positions: Sequence[int], extra: Sequence[Any]) -> Download:
    """The token of each row of logits [M, V], the largest probability, [M] each, and other tensors, on the way to the host.

    The probability is not a number if the row's largest logit is not finite.
    """
    if logits.device.type == "cuda":
        ranking = ranking_of(logits)
        likely, probability = ranking.of(logits, 1)
        chosen = likely[:, 0] if params.greedy else ranking.sampled(logits, params, positions)
    else:
        probability, chosen = likeliest(logits, 1)[1], DeviceSampler(params).sample(logits, positions).int()
    return Download(chosen, probability[:, 0], *extra)


def draw(
    logits: torch.Tensor, params: SamplingParams, positions: Sequence[int], sampler: DeviceSampler, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` tokens of the best scores in each row of logits [M, V], and their probabilities, [M, count].

    So they are sampled without replacement. `sampler` is the request's.
    """
    if logits.device.type == "cuda":
        from outrider.verify.model.gpu import triton_sampling  # Triton is only needed on a GPU

        if count <= triton_sampling.MOST_DRAWS:
            return triton_sampling.draw(logits, params, positions, count)
    weights = warp_logits(logits.float(), params)
    tokens = sampler.scores(weights, positions).topk(count, -1).indices
    return tokens.int(), weights.softmax(-1).gather(-1, tokens)


def distribution(logits: torch.Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """`outrider.verify.sampling.sampler.distribution`; waits for the device."""
    found: NDArray[np.float64] = warp_logits(logits[None], params)[0].double().softmax(-1).cpu().numpy()
    check_finite(found.sum())
    return found


def logprobs(logits: torch.Tensor, tokens: NDArray[np.int32], count: int) -> list[Any]:
    """The arrays of `outrider.verify.sampling.logprobs.logprobs_of`."""
    values = logits.float().log_softmax(-1)
    chosen = values.gather(1, to_device(torch.from_numpy(tokens).long(), values.device)[:, None])[:, 0]
    top, ids = values.topk(count, -1)
    return Download(chosen, ids.int(), top).arrays()


def copies(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See `outrider.verify.sampling.rows`."""
    rows = joined(parts)
    return [each.clone() for each in parts] if rows is None else [*rows.clone().split([*map(len, parts)])]


@contextmanager
def decided_together(parts: Sequence[torch.Tensor]) -> Iterator[None]:
    """See `outrider.verify.sampling.rows`."""
    with one_copy(), ranked_together(parts):
        yield
