"""Sampling with keyed noise, which the drafters know before the target's forward.

The Gumbel noise of a token is a function of (seed, position, token), as on Outrider's server: adding it to the log-weights and
taking the largest is an exact sample, and the same one for any draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Floats
from outrider.drafters.native.library import native
from outrider.drafters.noise import mix


@dataclass(frozen=True)
class Keyed:
    """How a target samples. Implements `Sampling`; it filters if `top_k` is set or `filters` says so."""

    temperature: float = 1.0
    top_k: int = 0
    filters: bool = False  # whether unlikely tokens are excluded
    seed: int = 0
    rule = "keyed"
    greedy = False

    def choose(self, scores: Floats, position: int) -> int:
        """The target's token at a position of the answer, counted from 0; `scores` are its log-weights, float32 [V].

        Temperature and filters have been applied to them: an excluded token has -inf.
        """
        return int(_largest(np.uint64(mix(self.seed)), position, np.ascontiguousarray(scores, np.float32)))


@native
def _largest(seed: np.uint64, position: int, scores: NDArray[np.float32]) -> int:
    """The token whose score has the largest sum with its noise; the smaller id of equal ones."""
