"""What the target chooses at a node: greedy, or keyed sampling.

Keyed sampling adds Gumbel noise, a function of (request seed, position, token) alone, to the processed log-weights and takes
the largest: an exact draw from the distribution (Gumbel-max). So the answer for a seed is the same for every drafter,
every budget and no drafter at all. One uniform per position and the inverse CDF would be exact too, but each of the
vocabulary's boundaries is then a near-tie: rounding in the last bit flips a token every few thousand. Here only the two
likeliest candidates can tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from verify.model.transfer import to_device
from verify.sampling_params import SamplingParams

MASK = (1 << 64) - 1
NOISE_NUMBERS = 1 << 16  # computed at once; more do not fit a processor's cache


def gumbel(seed: int, positions: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """The noise of positions, float32 [P, V]: splitmix64 of (seed, position, token), the same on every device."""
    keys = [_signed(_mix(_mix(seed) ^ position * 0xD1B54A32D192ED03 & MASK)) for position in positions]
    tokens = torch.arange(vocabulary, device=device) * _signed(0x9E3779B97F4A7C15)
    x = tokens + to_device(torch.tensor(keys), device)[:, None]
    room = torch.empty_like(x)
    x ^= _shift(x, 30, room)
    x *= _signed(0xBF58476D1CE4E5B9)
    x ^= _shift(x, 27, room)
    x *= _signed(0x94D049BB133111EB)
    x ^= _shift(x, 31, room)
    uniform = _shift(x, 11, room).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_().float()


def uniform(seed: int, position: int, number: int) -> float:
    """A number in [0, 1), a function of its arguments alone."""
    return (_mix(_mix(_mix(seed) ^ position * 0xD1B54A32D192ED03 & MASK) ^ (number + 1)) >> 11) / (1 << 53)


def _mix(x: int) -> int:
    """Splitmix64's finalizer, on Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the same bits: torch multiplies int64 modulo 2**64, too."""
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, bits: int, room: torch.Tensor) -> torch.Tensor:
    """Logical right shift of int64, into `room`."""
    return torch.bitwise_right_shift(x, bits, out=room).bitwise_and_((1 << (64 - bits)) - 1)


def warp_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What tokens are drawn from: logits [M, V] to log-weights, float32 [M, V]; their softmax is the distribution.

    Temperature, then top-k, top-p and min-p, each on what the one before left. Of equal logits the smaller id counts as
    the likelier. Excluded tokens weigh -inf.
    """
    scaled = logits.float()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / params.temperature  # the largest is 0, however small the divisor
    if params.top_k or params.top_p < 1.0:
        ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
        dropped = torch.zeros_like(ordered, dtype=torch.bool)
        if params.top_k:
            dropped[:, params.top_k :] = True
        if params.top_p < 1.0:
            mass = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
            dropped |= mass.cumsum(-1) - mass >= params.top_p
        scaled = scaled.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), -torch.inf)
    if params.min_p:
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + math.log(params.min_p), -torch.inf)
    return scaled


class Sampler:
    """Chooses one request's tokens. Keeps the noise of the positions in play, which successive steps share."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._noise = torch.empty(0, 0)  # [P, V], of the positions from `_first` on
        self._first = 0

    def choose(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """The target's own token at each of M nodes: logits [M, V] and each node's output position, to int64 [M]."""
        if self._params.greedy:
            return logits.max(-1).indices  # of bfloat16, argmax takes three times as long
        return self.scores(warp_logits(logits, self._params), positions).argmax(-1)

    def scores(self, weights: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Log-weights [M, V] with their noise: the largest of each row is a draw, the K largest are K without replacement."""
        first, last = min(positions), max(positions)
        if first < self._first or last >= self._first + len(self._noise):
            kept = self._noise[first - self._first :] if first >= self._first else self._noise[:0]
            # Some more than needed at once: it costs less than one by one.
            more = range(first + len(kept), max(last + 1, first + NOISE_NUMBERS // weights.shape[-1]))
            noise = gumbel(self._params.seed, more, weights.shape[-1], weights.device)
            self._noise, self._first = torch.cat([kept, noise]) if len(kept) else noise, first
        index = to_device(torch.tensor(positions) - self._first, weights.device)
        return weights + self._noise[index]
