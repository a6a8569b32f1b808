"""Measured costs and gains of drafting, and the estimates by which drafters and budgets decide.

All means are exponential moving averages (`ema`). Actions that do not pay are probed occasionally, in case they pay again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from outrider.drafters.interface import Floats
from outrider.drafters.state import State, array, join, numbers, part, restore

DECAY = 0.9  # weight of earlier values in an EMA
PROBE_INTERVAL = 16  # steps between two probes of an action that does not pay
CALIBRATION_BINS = 10
CALIBRATION_PRIOR = 4.0  # pseudo-observations of the draft model's own probability
CALIBRATION_DECAY = 0.999  # weight of earlier observations, per new one
OUTLIER = 3.0  # times the mean
TRUST_PRIOR = 0.2  # initial expected and accepted tokens per step: full trust
GAIN_PRIOR = 0.3  # initial estimate of the tokens that a draft model adds to a step
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # tokens that the tables expect; means are kept separately between these


def ema(mean: float, value: float) -> float:
    """Updates an exponential moving average with one more value. It starts at 0 and takes the first value as it is."""
    return DECAY * mean + (1 - DECAY) * value if mean else value


def bounded(mean: float, value: float) -> float:
    """A duration, at most OUTLIER times its mean: what else the machine does delays a step now and then."""
    return min(value, OUTLIER * mean) if mean else value


class Probe:
    """Is due in one of `interval` calls; with `longest`, the interval doubles up to it each time, until `reset`."""

    def __init__(self, interval: int = PROBE_INTERVAL, longest: int = 0) -> None:
        self._shortest = self._interval = interval
        self._longest = longest
        self._calls = 0

    def due(self) -> bool:
        """Counts a call; true for every `interval`-th."""
        self._calls += 1
        if self._calls < self._interval:
            return False
        self._calls = 0
        self._interval = max(self._interval, min(2 * self._interval, self._longest))
        return True

    def reset(self) -> None:
        """Sets the interval to its first value."""
        self._interval = self._shortest

    def state(self) -> State:
        return {"calls": np.array([self._calls, self._interval])}

    def load(self, saved: State) -> None:
        self._calls, self._interval = array(saved, "calls", np.int64, 2).tolist()


class CostBenefit:
    """Compares the time of an action with the time that its extra tokens would take without it."""

    def __init__(self) -> None:
        self.seconds = 0.0  # per action (EMA)
        self._step_seconds = 0.0  # per step (EMA)
        self._step_tokens = 0.0  # emitted per step (EMA)
        self._probe = Probe()

    @property
    def token_seconds(self) -> float:
        """The time per emitted token; 0 if it has not been measured."""
        return self._step_seconds / self._step_tokens if self._step_tokens else 0.0

    def pays(self, tokens: float) -> bool:
        """Whether an action that is expected to add `tokens` is worth its time."""
        return tokens * self.token_seconds >= self.seconds

    def pays_or_probes(self, tokens: float) -> bool:
        """As `pays`, but also true when a probe is due. Call once per step."""
        probe = self._probe.due()
        return self.pays(tokens) or probe

    def record_action(self, seconds: float) -> None:
        """Records the duration of an action."""
        self.seconds = ema(self.seconds, seconds)

    def record_step(self, tokens: int, seconds: float) -> None:
        """Records a step that emitted `tokens` tokens."""
        self._step_seconds = ema(self._step_seconds, bounded(self._step_seconds, seconds))
        self._step_tokens = ema(self._step_tokens, tokens)

    def state(self) -> State:
        return {"means": numbers(self.seconds, self._step_seconds, self._step_tokens), **join(probe=self._probe.state())}

    def load(self, saved: State) -> None:
        self.seconds, self._step_seconds, self._step_tokens = array(saved, "means", np.float64, 3).tolist()
        self._probe.load(part(saved, "probe"))


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
        self._expected = ema(self._expected, expected)
        self._accepted = ema(self._accepted, accepted)

    def state(self) -> State:
        return {"means": numbers(self._expected, self._accepted)}

    def load(self, saved: State) -> None:
        self._expected, self._accepted = array(saved, "means", np.float64, 2).tolist()


class Calibration:
    """Estimates a candidate's acceptance from its rank and its probability in the draft model.

    A greedy draft model is overconfident, and samples share the target's noise, so that probability is not the probability of
    acceptance.
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

    def state(self) -> State:
        return {"tried": self._tried, "accepted": self._accepted}

    def load(self, saved: State) -> None:
        restore(self.state(), saved)


def _bin(probability: float) -> int:
    return min(CALIBRATION_BINS - 1, int(probability * CALIBRATION_BINS))


class LevelMeans:
    """Means (EMA) of a value, by the number of tokens that the tables expect in the step."""

    def __init__(self, start: float = 0.0) -> None:
        self._means = [start] * (len(LEVELS) + 1)

    def of(self, expected: float) -> float:
        """The mean for steps in which the tables expect about `expected` tokens."""
        return self._means[bisect_left(LEVELS, expected)]

    def record(self, expected: float, value: float) -> None:
        """Records the value of one step."""
        level = bisect_left(LEVELS, expected)
        self._means[level] = ema(self._means[level], value)
