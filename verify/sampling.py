"""What the target chooses at a node: greedy, or keyed sampling.

Keyed sampling draws one uniform per (request seed, position) and inverts the processed distribution's CDF. So the
answer for a seed is the same for every drafter, every budget and no drafter at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How a request wants its tokens chosen."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with at least this mass
    top_k: int = 0  # keep this many likeliest tokens; 0 = all
    min_p: float = 0.0  # keep tokens with at least this share of the likeliest one's probability
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def uniform(seed: int, position: int) -> float:
    """The noise of one position, in (0, 1): splitmix64 of (seed, position)."""
    x = _mix((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK)
    x = _mix((x ^ (position * 0xD1B54A32D192ED03)) & MASK)
    return ((x >> 11) + 0.5) / (1 << 53)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distributions that tokens are drawn from: logits [M, V] to probabilities, float64 [M, V], rows summing to 1.

    Temperature, then top-k, top-p and min-p, each on what the one before left. Of equal logits the smaller id counts as
    the likelier.
    """
    scaled = logits.double() / params.temperature
    if params.top_k or params.top_p < 1.0:
        ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
        dropped = torch.zeros_like(ordered, dtype=torch.bool)
        if params.top_k:
            dropped[:, params.top_k :] = True
        if params.top_p < 1.0:
            mass = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
            dropped |= mass.cumsum(-1) - mass >= params.top_p
        scaled = scaled.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), -torch.inf)
    probabilities = scaled.softmax(-1)
    if params.min_p:
        weak = probabilities < params.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(weak, 0.0)
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities


def choose(logits: torch.Tensor, params: SamplingParams, positions: list[int]) -> torch.Tensor:
    """The target's own token at each of M nodes: logits [M, V] and each node's output position, to int64 [M]."""
    if params.greedy:
        return logits.argmax(-1)
    cumulative = processed(logits, params).cumsum(-1)
    noise = torch.tensor([uniform(params.seed, p) for p in positions], dtype=torch.float64, device=logits.device)
    # Scaled to the last entry, so that rounding never leaves the draw beyond the end.
    threshold = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
