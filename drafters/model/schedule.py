"""When a draft model drafts beside tables: before a verification, during it, or not at all, by what was measured.

Drafts from tables are nearly free, a model's forwards are not. Drafting before a verification takes its own time. Drafting
during it may slow it down, because both models share cores or a device, and the step waits for the model's last forward. Both
are worth their time if the tokens that the model adds would take longer without it. Those are tracked by the number of tokens
that the tables expect: a model adds most where these know little. A model that does not pay is probed now and then, for a
small share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.drafters.policy import GAIN_PRIOR, CostBenefit, LevelMeans, Probe, bounded

PROBE_STEPS = 4  # consecutive steps; a chain needs some to grow
PROBE_SHARE = 0.01  # of the time, at most, that probes take
LONGEST_CONTROL_INTERVAL = 1024  # steps with drafting between two without, if these have long confirmed what was known
LATELY = 32  # steps
MIN_GAIN = 0.02  # of a step's time; the least that drafting during a verification must save


@dataclass(frozen=True)
class Choice:
    """What the draft model does in one step."""

    before: bool = False  # it drafts before the verification
    beside: bool = False  # it drafts during it
    is_probe: bool = False  # it drafts only to be measured again


class Schedule:
    """The costs and gains of a draft model for one kind of requests. Shared by all sessions, which measure them together."""

    def __init__(self) -> None:
        self._before = CostBenefit()
        self._before_gains = LevelMeans(GAIN_PRIOR)
        self._beside_gains = LevelMeans(GAIN_PRIOR)  # in the next step
        self._seconds = {beside: LevelMeans() for beside in (False, True)}  # of a step without drafting before it
        self._control = Probe(longest=LONGEST_CONTROL_INTERVAL)  # of steps without drafting where it pays
        self._probing = 0  # steps left of a probe
        self._probe_seconds = 0.0  # that the last probe took beyond the steps' own time
        self._allowance = 0.0  # seconds that probes may take
        self._unpaid = 0  # steps since drafting paid

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        """Itself: all sessions share it."""
        return self

    @property
    def pays_lately(self) -> bool:
        """Whether the model has drafted in one of the last steps; at first it has."""
        return self._unpaid < LATELY

    @property
    def token_seconds(self) -> float:
        """The time per emitted token; 0 if it has not been measured."""
        return self._before.token_seconds

    def choose(self, expected: float, has_chain: bool) -> Choice:
        """The choice for a step in which the tables expect `expected` tokens. Call once per step."""
        before = not has_chain and self._before.pays(self._before_gains.of(expected))
        beside = self._beside_pays(expected)
        if not beside:
            self._control.reset()
        if before or beside:
            self._unpaid, self._probing = 0, 0
            return Choice(before, beside and not self._control.due())
        self._unpaid += 1
        if not self._probing and self._allowance >= self._probe_seconds:
            self._probing, self._probe_seconds = PROBE_STEPS, 0.0
        if not self._probing:
            return Choice()
        self._probing -= 1
        return Choice(not has_chain, True, is_probe=True)

    def record_probe(self, expected: float, choice: Choice, seconds: float) -> None:
        """Records the whole time of a step. PROBE_SHARE of it is saved for probes, which spend what they add to a step."""
        if choice.is_probe:
            extra = max(0.0, seconds - self._seconds[False].of(expected))
            self._probe_seconds += extra
            self._allowance -= extra
        elif not self._probing:
            self._allowance = min(self._allowance + PROBE_SHARE * seconds, self._probe_seconds)

    def record_before(self, expected: float, tokens: int, seconds: float) -> None:
        """Records a draft before a verification: the tokens that it added, and its time."""
        self._before_gains.record(expected, tokens)
        if seconds:
            self._before.record_action(bounded(self._before.seconds, seconds))

    def record_beside(self, expected: float, tokens: float) -> None:
        """Records the tokens that a draft during a verification added to the next step."""
        self._beside_gains.record(expected, tokens)

    def record_step(self, expected: float, beside: bool, seconds: float) -> None:
        """Records the time of a step without drafting before it."""
        means = self._seconds[beside]
        means.record(expected, bounded(means.of(expected), seconds))

    def record_tokens(self, tokens: int, seconds: float) -> None:
        """Records the emitted tokens and the whole time of a step."""
        self._before.record_step(tokens, seconds)

    def net_of_before(self, expected: float) -> float:
        """What drafting before a verification is worth, in tokens."""
        seconds = self.token_seconds
        return max(0.0, self._before_gains.of(expected) - self._before.seconds / seconds) if seconds else 0.0

    def _beside_pays(self, expected: float) -> bool:
        alone, both = self._seconds[False].of(expected), self._seconds[True].of(expected)
        if not (alone and both):
            return not both  # measures both, one after the other
        return self._beside_gains.of(expected) * self.token_seconds >= both - alone + MIN_GAIN * alone


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
