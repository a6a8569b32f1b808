"""Measured costs and gains of drafting, and the estimates by which drafters and budgets decide.

All means are exponential moving averages (`ema`). Actions that do not pay are probed occasionally, in case they pay again.
"""

import math
from bisect import bisect
from collections.abc import Sequence

import numpy as np

from outrider.drafters.interface import Floats
from outrider.drafters.state import State, restore

# An EMA gives its earlier mean this weight.
DECAY = 0.9
# Few tokens are accepted per step, so their mean needs more steps than the mean of a duration.
TRUST_DECAY = 0.95
PROBE_INTERVAL = 16
# Probabilities are told apart at these borders. Long chains depend on the largest ones.
BORDERS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
# Each bin starts with this many observations, in which the draft model's own probability was right.
CALIBRATION_PRIOR = 4.0
# Each new observation multiplies the weight of earlier ones by this.
CALIBRATION_DECAY = 0.999
OUTLIER = 3.0
# A cost follows these shares of a deviation. Other work on the machine only adds time, so what took less than expected says
# more than what took more.
FALL, RISE = 1 / 6, 1 / 24
# A single one cannot show a larger factor than this.
MOST_DEVIATION = 2.0
# Expected and accepted tokens per step start with the same small value: full trust that the first steps can change.
TRUST_PRIOR = 0.2


def ema(mean: float | None, value: float, decay: float = DECAY) -> float:
    """Updates an exponential moving average with one more value. A mean of None means "no value yet"."""
    return value if mean is None else decay * mean + (1 - decay) * value


def bounded(mean: float | None, value: float) -> float:
    """Limits a duration to OUTLIER times its mean, because other work on the machine delays a step now and then."""
    return value if mean is None else min(value, OUTLIER * mean)


def deviation(ratio: float) -> float:
    """The logarithm of measured over expected seconds, as far as a single measurement counts."""
    return math.log(min(max(ratio, 1 / MOST_DEVIATION), MOST_DEVIATION))


def correction(deviation: float) -> float:
    """The factor by which a cost follows a deviation. All costs that are compared must do so alike."""
    return math.exp((FALL if deviation < 0 else RISE) * deviation)


class Probe:
    """Fires once in `interval` ticks. With `longest`, the interval doubles each time, up to `longest`, until `reset`."""

    def __init__(self, interval: int = PROBE_INTERVAL, longest: int = 0) -> None:
        self._shortest = self._interval = interval
        self._longest = longest
        self._calls = 0

    def tick(self) -> bool:
        """Counts a call; returns True for every `interval`-th."""
        self._calls += 1
        if self._calls < self._interval:
            return False
        self._calls = 0
        self._interval = max(self._interval, min(2 * self._interval, self._longest))
        return True

    def reset(self) -> None:
        """Sets the interval to its first value."""
        self._interval = self._shortest


class Share:
    """A share of successes that starts with an assumption and follows the latest cases."""

    def __init__(self, mean: float, cases: float, most: float) -> None:
        """`mean` counts as much as `cases` cases; of later ones, about the last `most` count."""
        self.mean, self.cases, self._most = mean, cases, most

    def record(self, success: float) -> None:
        """Records one case: True or False, or a number whose mean is followed."""
        self.cases = min(self.cases + 1, self._most)
        self.mean += (success - self.mean) / self.cases

    @property
    def deviation(self) -> float:
        """The standard deviation of the mean."""
        return math.sqrt(self.mean * (1 - self.mean) / self.cases)

    def state(self) -> tuple[float, float, float]:
        """The arguments that create it."""
        return self.mean, self.cases, self._most


class Trust:
    """How far to trust a drafter's probabilities: the ratio of accepted to expected tokens."""

    def __init__(self) -> None:
        self._expected = self._accepted = TRUST_PRIOR  # tokens per step (EMA)

    @property
    def factor(self) -> float:
        """The factor that calibrates the drafter's probabilities on average; at most 1."""
        return min(1.0, self._accepted / self._expected)

    def record(self, expected: float, accepted: int) -> None:
        """Records one draft: the sum of the probabilities of its next tokens, and the number of accepted ones."""
        self._expected = ema(self._expected, expected, TRUST_DECAY)
        self._accepted = ema(self._accepted, accepted, TRUST_DECAY)


class Calibration:
    """Estimates a candidate's acceptance from its rank and its probability in the draft model.

    A greedy draft model is overconfident, and samples share the target's noise, so that probability is not the probability of
    acceptance.
    """

    def __init__(self, ranks: int) -> None:
        edges = np.array([0.0, *BORDERS, 1.0])
        middles = (edges[1:] + edges[:-1]) / 2
        self._tried = np.full((ranks, len(middles)), CALIBRATION_PRIOR)
        self._accepted = np.tile(middles * CALIBRATION_PRIOR, (ranks, 1))

    def acceptance(self, rank: int, probability: float) -> float:
        """The estimated probability that the target accepts the candidate of this rank (0 = first)."""
        cell = self._cell(rank, probability)
        return min(0.999, float(self._accepted[cell] / self._tried[cell]))

    def record(self, ranks: Sequence[int], probability: Floats | Sequence[float], accepted: int | None) -> None:
        """Records the target's choice at a node with these candidates: the index of the accepted one, or None."""
        for index, (rank, share) in enumerate(zip(ranks, probability, strict=True)):
            cell = self._cell(rank, float(share))
            self._tried[cell] = CALIBRATION_DECAY * self._tried[cell] + 1
            self._accepted[cell] = CALIBRATION_DECAY * self._accepted[cell] + (index == accepted)

    def _cell(self, rank: int, probability: float) -> tuple[int, int]:
        """The indices of a rank, of which all beyond the last share its cells, and of a probability."""
        return min(rank, len(self._tried) - 1), bisect(BORDERS, probability)

    def state(self) -> State:
        return {"tried": self._tried, "accepted": self._accepted}

    def load(self, saved: State) -> None:
        restore(self.state(), saved)
