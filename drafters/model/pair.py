"""What is known of a draft model beside its target: the seconds of its forwards, and how often it is right.

All sessions share it, and it is saved for the next start. `Estimate` decides by it whether a step drafts more or verifies.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES, Floats, Work
from outrider.drafters.policy import Calibration, Share, correction, deviation, ema

# Ranks of candidates whose acceptance is told apart; further ones count as the last.
RANKS = 4
# The prior acceptance of a draft model's tokens, and its weight in observations.
PRIOR, PRIOR_CASES = 0.7, 8.0
# Kinds of text by the target's own confidence, its mean probability of the likeliest token: the borders between them.
CONFIDENCES = (0.6, 0.7, 0.8, 0.9)
KINDS = len(CONFIDENCES) + 2
# The mean of a kind follows the last ones of this many tokens.
CASES = 400.0
# Probes of a draft model that does not pay take at most this share of the time, and save up at most this many seconds.
PROBE_SHARE, PROBE_SECONDS = 0.02, 2.0
# Drafting must raise the tokens per second by this much: the estimate has errors, and more nodes have costs of their own.
LEAST_GAIN = 1.03
# What is measured replaces what is known where it is less than this share of it.
DISTURBED = 0.8
# Answers have about this many tokens until some have ended.
ANSWER_TOKENS = 200.0
# What a draft model saves is that of about the last SAVED_TOKENS tokens. What is expected before any are measured weighs as
# much as EXPECTED_TOKENS tokens.
SAVED_TOKENS, EXPECTED_TOKENS = 400.0, 32.0
# A forward over up to this many unread tokens takes as long as one over a single row.
FEW_TOKENS = 2
# A draft looks at most this many tokens ahead, to see whether later ones pay for the first.
AHEAD = 16


class Savings:
    """Tokens and seconds of steps before which the draft model had read the text, and of the same steps without it."""

    def __init__(self, totals: Sequence[float] = (0.0,) * 4) -> None:
        self.totals = np.array(totals, np.float64).reshape(2, 2)  # with and without the model: tokens and seconds

    def record(self, tokens: int, seconds: float, tokens_without: int, seconds_without: float) -> None:
        """Records a step, and what it would have been without the model."""
        self.totals *= max(0.0, 1 - tokens / SAVED_TOKENS)
        self.totals += (tokens, seconds), (tokens_without, seconds_without)

    def share(self, expected: float) -> float:
        """The share of the seconds per token that it saves; `expected` before anything is measured."""
        (tokens, seconds), (tokens_without, seconds_without) = self.totals.tolist()
        taken = seconds * tokens_without / seconds_without if tokens else 0.0  # in units of seconds per token without it
        return 1 - (taken + EXPECTED_TOKENS * (1 - expected)) / (tokens + EXPECTED_TOKENS)


class Acceptance:
    """How often the target accepts the draft model's tokens, by what was known before and after their drafting."""

    def __init__(self) -> None:
        self.calibration = Calibration(RANKS)
        self.kinds = [Share(PRIOR, PRIOR_CASES, CASES) for _ in range(KINDS)]
        # By the position in a block whose earlier tokens are right, in units of a kind's mean.
        self.positions = [Share(1.0, PRIOR_CASES, CASES) for _ in range(MAX_NODES)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Acceptance:
        """Itself: all sessions share it."""
        return self

    def kind(self, confidence: float | None) -> Share:
        """Acceptance of the next token, before it is drafted, in text of which the target is so confident; None = unknown."""
        return self.kinds[kind_of(confidence)]

    def record(self, kind: Share, position: int, was_right: bool) -> None:
        """Records whether a token at this position of a forward was accepted, in text of this kind."""
        self.positions[position].record(was_right / max(kind.mean, 0.05))
        kind.record(was_right)


def kind_of(confidence: float | None) -> int:
    """The kind of text of which the target is so confident; None = unknown, the last kind."""
    return KINDS - 1 if confidence is None else bisect(CONFIDENCES, confidence)


class Pair:
    """A draft model and its target on this machine. Shared by all sessions."""

    def __init__(
        self,
        target_seconds: float = 0.0,
        draft_seconds: float = 0.0,
        read_seconds: float = 0.0,
        costs: Callable[[int], NDArray[np.float64]] | None = None,
    ) -> None:
        """Seconds of the target's step, of the draft model's forward after a short text, and of reading a token of a prompt.

        `costs` is the target's curve, `CostCurve.at`, if there is one.
        """
        self._costs = costs
        self.target_seconds, self.draft_seconds, self.read_seconds = target_seconds, draft_seconds, read_seconds
        self.context_seconds = 0.0  # that each token of the text adds to the draft model's forward
        # How many times as long the target's step and the draft model's forward take while both run, and a step after drafts.
        self.target_slowdown = self.draft_slowdown = self.after_slowdown = 1.0
        self.answer_tokens = ANSWER_TOKENS  # of a finished answer (EMA)
        self.block = 1  # tokens that a forward of the draft model drafts
        self._acceptance = {greedy: Acceptance() for greedy in (False, True)}
        self._savings: dict[str, list[Savings]] = {}  # of each kind of text, by drafter and sampling
        self._allowance = PROBE_SECONDS  # seconds that probes may take; a pair that is known has to save them up
        self.is_corrected = False  # whether it has changed since it was loaded or saved

    def __deepcopy__(self, memo: dict[int, Any]) -> Pair:
        """Itself: all sessions share it."""
        return self

    def acceptance(self, greedy: bool) -> Acceptance:
        """The acceptance in requests that are greedy, or sample."""
        return self._acceptance[greedy]

    def savings(self, drafter: str, greedy: bool, kind: int) -> Savings:
        """What the draft model saves a drafter in text of a kind, in requests that are greedy, or sample."""
        name = f"{drafter} {'greedy' if greedy else 'sampling'}"
        return self._savings.setdefault(name, [Savings() for _ in range(KINDS)])[kind]

    def step_seconds(self, context: int) -> NDArray[np.float64]:
        """Seconds of the target's step over 0, 1, ... nodes after `context` tokens."""
        return np.full(MAX_NODES + 1, self.target_seconds) if self._costs is None else self._costs(context)

    def forward_seconds(self, context: int) -> float:
        """Seconds of the draft model's forward over one row after `context` tokens."""
        return self.draft_seconds + context * self.context_seconds

    def tokens_beside(self, step_seconds: float, context: int) -> float:
        """The tokens that are drafted beside a step after `context` tokens that alone would take so long."""
        forward = self.forward_seconds(context) * self.draft_slowdown
        return self.block * step_seconds * self.target_slowdown / forward if forward > 0 else float(MAX_NODES)

    def correct(self, found: Mapping[str, float]) -> bool:
        """Takes measured figures, by name, if they are the first, or if known ones were disturbed; whether it does.

        Other work on the machine only adds time.
        """
        known = {name: getattr(self, name) for name in TIMES}
        if all(known.values()) and all(found[name] >= DISTURBED * seconds for name, seconds in known.items()):
            return False
        for name, value in found.items():
            setattr(self, name, value)
        self.is_corrected = True
        return True

    def record_forward(self, context: int, seconds: float, beside: bool) -> None:
        """Records a forward of the draft model over few rows after `context` tokens."""
        expected = self.forward_seconds(context)
        if not expected:
            self.draft_seconds = 0.0 if beside else seconds
        elif beside:
            self.draft_slowdown = slowdown(self.draft_slowdown, seconds / expected)
        else:
            change = correction(deviation(seconds / expected))
            self.draft_seconds, self.context_seconds = self.draft_seconds * change, self.context_seconds * change

    def record_reading(self, tokens: int, seconds: float) -> None:
        """Records the reading of a prompt's tokens by the draft model."""
        known = self.read_seconds or seconds / tokens
        self.read_seconds = known * correction(deviation(seconds / tokens / known))

    def priced(self, work: Work) -> Work:
        """The work with the slowdown of the verification that it causes."""
        ran = work.seconds + work.invested > 0
        return work._replace(slowdown=self.target_slowdown if work.beside else self.after_slowdown if ran else 1.0)

    def record_verification(self, ratio: float, work: Work) -> None:
        """Records a target's step that took `ratio` times as long as it would have without the draft model's `work`."""
        if work.beside:
            self.target_slowdown = slowdown(self.target_slowdown, ratio)
        elif work.seconds + work.invested > 0:
            self.after_slowdown = slowdown(self.after_slowdown, ratio)

    def record_answer(self, tokens: int) -> None:
        """Records the length of an answer."""
        self.answer_tokens = ema(self.answer_tokens, float(tokens))

    def save_for_probes(self, seconds: float) -> None:
        """Records the time of a step, a share of which probes may take."""
        self.is_corrected = True
        self._allowance = min(PROBE_SECONDS, self._allowance + PROBE_SHARE * seconds)

    def may_probe(self, seconds: float) -> bool:
        """Whether probes may take so long now."""
        return seconds <= self._allowance

    def spend(self, seconds: float) -> None:
        """Records what a probe has taken."""
        self._allowance -= seconds

    def state(self) -> dict[str, Any]:
        """The state that `load` reads, for JSON."""
        kinds = {
            str(greedy): {
                "tried": each.calibration.state()["tried"].tolist(),
                "accepted": each.calibration.state()["accepted"].tolist(),
                "kinds": [kind.state() for kind in each.kinds],
                "positions": [position.state() for position in each.positions],
            }
            for greedy, each in self._acceptance.items()
        }
        savings = {name: [each.totals.ravel().tolist() for each in found] for name, found in self._savings.items()}
        return {name: getattr(self, name) for name in FIGURES} | {"acceptance": kinds, "savings": savings}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores a state. Raises ValueError if it does not fit."""
        try:
            figures = {name: float(saved[name]) for name in FIGURES}
            for greedy, each in self._acceptance.items():
                found = saved["acceptance"][str(greedy)]
                each.calibration.load({name: np.array(found[name], np.float64) for name in ("tried", "accepted")})
                each.kinds = [Share(*map(float, kind)) for kind in found["kinds"]]
                each.positions = [Share(*map(float, position)) for position in found["positions"]]
            savings = {str(name): [Savings(each) for each in found] for name, found in saved["savings"].items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if not all(0 <= value < float("inf") for value in figures.values()):
            raise ValueError("its seconds must be numbers of at least 0")
        if any(len(each) != KINDS for each in savings.values()):
            raise ValueError("its savings are of other kinds of text")
        for name, value in figures.items():
            setattr(self, name, value)
        self._savings, self._allowance = savings, 0.0


TIMES = "draft_seconds", "read_seconds"
FIGURES = (
    "target_seconds",
    "draft_seconds",
    "context_seconds",
    "read_seconds",
    "target_slowdown",
    "draft_slowdown",
    "after_slowdown",
    "answer_tokens",
)


def cost_of(nodes: int, costs: NDArray[np.float64]) -> float:
    """Seconds of the target's step over these nodes; `costs` are by nodes."""
    return float(costs[min(nodes, len(costs) - 1)])


def slowdown(mean: float, ratio: float) -> float:
    """A slowdown after one more measurement."""
    return max(1.0, mean * correction(deviation(ratio / mean)))


@dataclass
class Estimate:
    """The tokens and seconds that a step is expected to have with what has been drafted for it."""

    tokens: float  # that it emits
    nodes: int  # that it verifies
    drafting: float  # seconds of the drafting for it
    costs: NDArray[np.float64]  # seconds of the target's step by nodes
    slowdown: float = 1.0  # of the target's step after drafts

    @classmethod
    def of(cls, probability: Floats, costs: NDArray[np.float64], drafting: float = 0.0, slowdown: float = 1.0) -> Estimate:
        """The estimate of a step that verifies those nodes of a tree that pay, by their path probabilities, float32 [N]."""
        tokens = np.cumsum(np.r_[1.0, np.sort(probability)[::-1]])[: len(costs)]
        seconds = costs[: len(tokens)] * (slowdown if drafting else 1.0) + drafting
        nodes = int(np.argmax(tokens / np.maximum(seconds, 1e-9)))
        return cls(float(tokens[nodes]), nodes, drafting, costs, slowdown)

    @property
    def seconds(self) -> float:
        """Seconds of drafting and verification."""
        return self._seconds(self.drafting, self.nodes)

    def _seconds(self, drafting: float, nodes: int) -> float:
        return drafting + cost_of(nodes, self.costs) * (self.slowdown if drafting else 1.0)

    def rate(self, tokens: float = 0.0, seconds: float = 0.0, nodes: int = 0) -> float:
        """Tokens per second after adding expected tokens, seconds of drafting and nodes to verify."""
        return (self.tokens + tokens) / max(self._seconds(self.drafting + seconds, self.nodes + nodes), 1e-9)

    def gains(self, tokens: float, seconds: float, nodes: int) -> bool:
        """Whether these raise the tokens per second."""
        return self.rate(tokens, seconds, nodes) > LEAST_GAIN * self.rate()

    def after_chain(self, gain: float, path: float, share: float, forward: float, fixed: float = 0.0) -> Iterator[float]:
        """Tokens per second after 1, 2, ... further forwards of a draft model.

        The first one adds `gain` tokens, and all that it adds is accepted with the probability `path`; each further one adds a
        token that is accepted with the probability `share`. A forward takes `forward` seconds, and what precedes it `fixed`.
        """
        for count in range(1, AHEAD + 1):
            yield self.rate(gain, fixed + count * forward, count)
            path *= share
            gain += path

    def after_block(self, gains: Sequence[float], seconds: float) -> Iterator[float]:
        """Tokens per second with 1, 2, ... nodes of a block, which one forward drafts in `seconds`.

        `gains` has the expected tokens that each node of the block adds.
        """
        return (self.rate(tokens, seconds, nodes) for nodes, tokens in enumerate(accumulate(gains), start=1))

    def any_gains(self, rates: Iterable[float]) -> bool:
        """Whether one of these clearly is more than the tokens per second now."""
        least = LEAST_GAIN * self.rate()
        return any(rate > least for rate in rates)
