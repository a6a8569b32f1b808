"""From what a draft model says to what comes true: how often its candidates of each rank and probability were accepted.

A draft model is sure of itself, or drafts with the target's own noise; neither is the probability that the target agrees.
"""

from __future__ import annotations

import numpy as np

from drafters.interface import Floats

BINS = 10
STRENGTH = 4.0  # observations that the model's own probability stands for
DECAY = 0.999  # weight of earlier observations, per new one


class Calibration:
    """Learns online, for one session."""

    def __init__(self, ranks: int) -> None:
        middles = (np.arange(BINS) + 0.5) / BINS
        self._seen = np.full((ranks, BINS), STRENGTH)
        self._accepted = np.tile(middles * STRENGTH, (ranks, 1))

    def accepted(self, rank: int, probability: float) -> float:
        """How likely the target takes the candidate of that rank (0 = first) where the model gave it `probability`."""
        cell = rank, bin_of(probability)
        return min(0.999, float(self._accepted[cell] / self._seen[cell]))

    def record(self, ranks: list[int], probability: Floats | list[float], accepted: int | None) -> None:
        """The target chose at a node with these candidates; `accepted` is the index of the one it took, if any."""
        for number, (rank, share) in enumerate(zip(ranks, probability, strict=True)):
            cell = rank, bin_of(float(share))
            self._seen[cell] = DECAY * self._seen[cell] + 1
            self._accepted[cell] = DECAY * self._accepted[cell] + (number == accepted)


def bin_of(probability: float) -> int:
    """Which tenth it is in."""
    return min(BINS - 1, int(probability * BINS))
