"""Decides by measured times when a draft model drafts in addition to tables: before a verification, during it, or not at all.

Drafts from tables are nearly free, a model's forwards are not. Drafting before a verification takes its own time. Drafting
during it may slow it down, because both models share cores or a device, and the step waits for the model's last forward. Both
are worth their time if the tokens that the model adds would take longer without it. These tokens are tracked by the number of
tokens that the tables expect, because a model adds most where the tables know little. A model that does not pay is probed now
and then, for a small share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.drafters.policy import GAIN_PRIOR, CostBenefit, LevelMeans, Probe, bounded

# A probe takes several consecutive steps, because a chain needs some to grow.
PROBE_STEPS = 4
# Probes take at most this share of the time.
PROBE_SHARE = 0.01
# Once steps without drafting have long confirmed that it pays, one step in this many still drafts nothing.
LONGEST_CONTROL_INTERVAL = 1024
# The model has drafted lately if it did in one of this many last steps.
LATELY = 32
# Drafting during a verification must save at least this share of a step's time.
MIN_GAIN = 0.02


@dataclass(frozen=True)
class ModelWork:
    """What the draft model does in one step."""

    before: bool = False  # it drafts before the verification
    during: bool = False  # it drafts during it
    is_probe: bool = False  # it drafts only to be measured again


class Schedule:
    """The costs and gains of a draft model for one kind of requests. Shared by all sessions, which measure them together."""

    def __init__(self) -> None:
        self._before = CostBenefit()
        self._before_gains = LevelMeans(GAIN_PRIOR)
        self._during_gains = LevelMeans(GAIN_PRIOR)  # tokens that drafting during a verification adds to the next step
        # Seconds of a step without drafting before it, by whether the model drafts during it.
        self._seconds = {during: LevelMeans() for during in (False, True)}
        self._control = Probe(longest=LONGEST_CONTROL_INTERVAL)  # when to measure a step without drafting
        self._probing = 0  # remaining steps of a probe
        self._probe_seconds = 0.0  # seconds that the last probe added to its steps
        self._allowance = 0.0  # seconds that probes may still take
        self._unpaid = 0  # steps since drafting last paid

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        """Itself: all sessions share it."""
        return self

    @property
    def was_worth_lately(self) -> bool:
        """Whether the model has drafted in one of the last steps; at first it has."""
        return self._unpaid < LATELY

    @property
    def token_seconds(self) -> float | None:
        """The time per emitted token; None if it has not been measured."""
        return self._before.token_seconds

    def choose(self, expected: float, has_chain: bool) -> ModelWork:
        """The choice for a step in which the tables expect `expected` tokens. Call once per step."""
        before = not has_chain and self._before.is_worth(self._before_gains.of(expected) or 0.0)
        during = self._is_worth_during(expected)
        if not during:
            self._control.reset()
        if before or during:
            self._unpaid, self._probing = 0, 0
            return ModelWork(before, during and not self._control.tick())
        self._unpaid += 1
        if not self._probing and self._allowance >= self._probe_seconds:
            self._probing, self._probe_seconds = PROBE_STEPS, 0.0
        if not self._probing:
            return ModelWork()
        self._probing -= 1
        return ModelWork(not has_chain, True, is_probe=True)

    def record_probe(self, expected: float, choice: ModelWork, seconds: float) -> None:
        """Records the whole time of a step. PROBE_SHARE of it is saved for probes, which spend what they add to a step."""
        if choice.is_probe:
            extra = max(0.0, seconds - (self._seconds[False].of(expected) or 0.0))
            self._probe_seconds += extra
            self._allowance -= extra
        elif not self._probing:
            self._allowance = min(self._allowance + PROBE_SHARE * seconds, self._probe_seconds)

    def record_before(self, expected: float, tokens: int, seconds: float) -> None:
        """Records a draft before a verification: the tokens that it added, and its time."""
        self._before_gains.record(expected, tokens)
        if seconds:
            self._before.record_action(bounded(self._before.seconds, seconds))

    def record_during(self, expected: float, tokens: float) -> None:
        """Records the tokens that a draft during a verification added to the next step."""
        self._during_gains.record(expected, tokens)

    def record_step(self, expected: float, during: bool, seconds: float) -> None:
        """Records the time of a step without drafting before it."""
        means = self._seconds[during]
        means.record(expected, bounded(means.of(expected), seconds))

    def record_tokens(self, tokens: int, seconds: float) -> None:
        """Records the emitted tokens and the whole time of a step."""
        self._before.record_step(tokens, seconds)

    def net_of_before(self, expected: float) -> float:
        """What drafting before a verification is worth, in tokens."""
        seconds = self.token_seconds
        return max(0.0, (self._before_gains.of(expected) or 0.0) - (self._before.seconds or 0.0) / seconds) if seconds else 0.0

    def _is_worth_during(self, expected: float) -> bool:
        alone, both = self._seconds[False].of(expected), self._seconds[True].of(expected)
        if alone is None or both is None:
            return both is None  # measures both, one after the other
        gain = (self._during_gains.of(expected) or 0.0) * (self.token_seconds or 0.0)
        return gain >= both - alone + MIN_GAIN * alone


class Schedules:
    """A schedule for greedy requests and one for those that sample, because a draft model is right less often there."""

    def __init__(self) -> None:
        self._of_greedy = {greedy: Schedule() for greedy in (False, True)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedules:
        """Itself: all sessions share them."""
        return self

    def of(self, greedy: bool) -> Schedule:
        """The schedule of a request."""
        return self._of_greedy[greedy]
