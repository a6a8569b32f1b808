"""Decides by measured times when a draft model drafts in addition to tables: before a verification, during it, or not at all.

Drafts from tables are nearly free, a model's forwards are not. Drafting before a verification takes its own time. Drafting
during it may slow it down, because both models share cores or a device, and the step waits for the model's last forward. Both
are worth their time if the tokens that the model adds would take longer without it. A model that does not pay is probed now and
then, for a small share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.drafters.policy import CostBenefit, Probe, bounded, ema

# A draft is assumed to add this many tokens until it is measured. A first guess that is too high costs a few steps, one that is
# too low costs the time until enough probes have corrected it.
GAIN_PRIOR = 2.0
# The tokens that a draft adds differ from step to step, so their mean changes slowly: chance seldom ends drafts that pay.
GAIN_DECAY = 0.98
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
    """The draft model's work in one step."""

    before: bool = False  # it drafts before the verification
    during: bool = False  # it drafts during it
    is_probe: bool = False  # it drafts only to be measured again


class Schedule:
    """The costs and gains of a draft model for one kind of requests. Shared by all sessions, which measure them together."""

    def __init__(self) -> None:
        self._before = CostBenefit()
        self._before_gain = GAIN_PRIOR  # tokens that drafting before a verification adds to it (EMA)
        self._during_gain = GAIN_PRIOR  # tokens that drafting during a verification adds to the next step (EMA)
        # Seconds of a step without drafting before it, by whether the model drafts during it (EMA).
        self._seconds: dict[bool, float | None] = {False: None, True: None}
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

    def choose(self, has_chain: bool) -> ModelWork:
        """The choice for a step. Call once per step."""
        before = not has_chain and self._before.is_worth(self._before_gain)
        during = self._is_worth_during()
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

    def record_probe(self, choice: ModelWork, seconds: float) -> None:
        """Records the whole time of a step. PROBE_SHARE of it is saved for probes, which spend what they add to a step."""
        if choice.is_probe:
            extra = max(0.0, seconds - (self._seconds[False] or 0.0))
            self._probe_seconds += extra
            self._allowance -= extra
        elif not self._probing:
            self._allowance = min(self._allowance + PROBE_SHARE * seconds, self._probe_seconds)

    def record_before(self, tokens: int, seconds: float) -> None:
        """Records a draft before a verification: the tokens that it added, and its time."""
        self._before_gain = ema(self._before_gain, tokens, GAIN_DECAY)
        if seconds:
            self._before.record_action(bounded(self._before.seconds, seconds))

    def record_during(self, tokens: float) -> None:
        """Records the tokens that a draft during a verification added to the next step."""
        self._during_gain = ema(self._during_gain, tokens, GAIN_DECAY)

    def record_step(self, during: bool, seconds: float) -> None:
        """Records the time of a step without drafting before it."""
        mean = self._seconds[during]
        self._seconds[during] = ema(mean, bounded(mean, seconds))

    def record_tokens(self, tokens: int, seconds: float) -> None:
        """Records the emitted tokens and the whole time of a step."""
        self._before.record_step(tokens, seconds)

    @property
    def net_of_before(self) -> float:
        """The tokens gained by drafting before a verification."""
        seconds = self.token_seconds
        return max(0.0, self._before_gain - (self._before.seconds or 0.0) / seconds) if seconds else 0.0

    def _is_worth_during(self) -> bool:
        alone, both = self._seconds[False], self._seconds[True]
        if alone is None or both is None:
            return both is None  # measures both, one after the other
        return self._during_gain * (self.token_seconds or 0.0) >= both - alone + MIN_GAIN * alone


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
