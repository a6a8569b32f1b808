"""What drafting is worth: measured costs and gains, and the estimates that drafters and budgets decide by.

One decaying mean (`ema`) throughout. Whatever does not pay is probed now and then, so that it is found again when it does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from drafters.interface import Floats

DECAY = 0.9  # weight of earlier values in a decaying mean
PROBE_INTERVAL = 16  # steps between two tries of what does not pay
CALIBRATION_BINS = 10
CALIBRATION_PRIOR = 4.0  # observations that the draft model's own probability counts for
CALIBRATION_DECAY = 0.999  # weight of earlier observations, per new one
PROMISE_PRIOR = 0.2  # expected and accepted tokens per step that full trust starts with
GAIN_PRIOR = 0.3  # tokens that a source is thought to add before it has been tried
GAIN_LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # expected tokens; gains are tracked separately between them


def ema(mean: float, value: float) -> float:
    """The decaying mean after one more value; a mean of 0 stands for no values yet."""
    return DECAY * mean + (1 - DECAY) * value if mean else value


class Probe:
    """Lets one in `interval` calls through."""

    def __init__(self, interval: int = PROBE_INTERVAL) -> None:
        self._interval = interval
        self._calls = 0

    def due(self) -> bool:
        """Counts a call; true for every `interval`-th."""
        self._calls += 1
        return self._calls % self._interval == 0


class CostBenefit:
    """Compares the seconds that an action takes with the seconds that the tokens it brings would take otherwise."""

    def __init__(self) -> None:
        self.seconds = 0.0  # per action (EMA)
        self.token_seconds = 0.0  # per emitted token (EMA)
        self._probe = Probe()

    def pays(self, tokens: float) -> bool:
        """Whether an action that is expected to bring `tokens` is worth its time."""
        return tokens * self.token_seconds >= self.seconds

    def pays_or_probes(self, tokens: float) -> bool:
        """As `pays`, but also true when a probe is due. Call once per step."""
        probe = self._probe.due()
        return self.pays(tokens) or probe

    def record_action(self, seconds: float) -> None:
        """Records what the action took."""
        self.seconds = ema(self.seconds, seconds)

    def record_step(self, tokens: int, seconds: float) -> None:
        """Records a step that emitted `tokens`."""
        self.token_seconds = ema(self.token_seconds, seconds / tokens)


class Promise:
    """How far a drafter's probabilities are to be trusted: accepted tokens over expected ones."""

    def __init__(self) -> None:
        self._expected = self._accepted = PROMISE_PRIOR  # tokens per step (EMA)

    @property
    def trust(self) -> float:
        """The factor that makes the drafter's probabilities true on average, at most 1."""
        return min(1.0, self._accepted / self._expected)

    def record(self, expected: float, accepted: int) -> None:
        """Records one draft: the probability it gave to its next tokens, summed, and how many of them were emitted."""
        self._expected = ema(self._expected, expected)
        self._accepted = ema(self._accepted, accepted)


class Calibration:
    """Maps a draft model's rank and probability of a candidate to how often the target accepts such candidates.

    A draft model is overconfident when greedy, and its samples share the target's noise; neither number is the probability
    of acceptance.
    """

    def __init__(self, ranks: int) -> None:
        middles = (np.arange(CALIBRATION_BINS) + 0.5) / CALIBRATION_BINS
        self._tried = np.full((ranks, CALIBRATION_BINS), CALIBRATION_PRIOR)
        self._accepted = np.tile(middles * CALIBRATION_PRIOR, (ranks, 1))

    def acceptance(self, rank: int, probability: float) -> float:
        """The estimated probability that the target accepts the candidate of this rank (0 = first)."""
        cell = rank, _bin(probability)
        return min(0.999, float(self._accepted[cell] / self._tried[cell]))

    def record(self, ranks: Sequence[int], probability: Floats | Sequence[float], accepted: int | None) -> None:
        """Records the target's choice at a node with these candidates: the index of the accepted one, or None."""
        for index, (rank, share) in enumerate(zip(ranks, probability, strict=True)):
            cell = rank, _bin(float(share))
            self._tried[cell] = CALIBRATION_DECAY * self._tried[cell] + 1
            self._accepted[cell] = CALIBRATION_DECAY * self._accepted[cell] + (index == accepted)


def _bin(probability: float) -> int:
    return min(CALIBRATION_BINS - 1, int(probability * CALIBRATION_BINS))


class Gains:
    """The tokens that one source adds to what the others already promise, by the level of that promise."""

    def __init__(self) -> None:
        self._gains = [GAIN_PRIOR] * (len(GAIN_LEVELS) + 1)  # tokens per step (EMA)

    def expected(self, promised: float) -> float:
        """The tokens that the source is expected to add where the others promise `promised` tokens."""
        return self._gains[bisect_left(GAIN_LEVELS, promised)]

    def record(self, promised: float, tokens: int) -> None:
        """Records the tokens that the source added in one step."""
        level = bisect_left(GAIN_LEVELS, promised)
        self._gains[level] = ema(self._gains[level], tokens)
