"""What is known of a draft model beside its target: the seconds of its forwards, and how often it is right.

All sessions share it, and it is saved for the next start. `Estimate` decides by it whether a step drafts more or verifies.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES, Floats
from outrider.drafters.policy import Calibration, Share, bounded, ema

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
# Answers have about this many tokens until some have ended.
ANSWER_TOKENS = 200.0
# Mean seconds per token are those of about the last PACE_TOKENS tokens. Before any are measured, a draft model that has read
# the text is assumed to save the share PRIOR_SAVED, an assumption that weighs as much as PRIOR_TOKENS tokens.
PACE_TOKENS, PRIOR_TOKENS, PRIOR_SAVED = 400.0, 32.0, 0.2
# A forward over up to this many unread tokens takes as long as one over a single row.
FEW_TOKENS = 2
# A draft looks at most this many tokens ahead, to see whether later ones pay for the first.
AHEAD = 16


class Pace:
    """Mean seconds per token while the draft model has not read the text, and while it has."""

    def __init__(self, totals: Sequence[float] = (0.0,) * 4) -> None:
        self.totals = np.array(totals, np.float64).reshape(2, 2)  # seconds and tokens, without and with the model

    def record(self, is_read: bool, tokens: int, seconds: float) -> None:
        """Records a step."""
        row = self.totals[int(is_read)]
        row *= max(0.0, 1 - tokens / PACE_TOKENS)
        row += seconds, tokens

    def saved(self, expected: float) -> tuple[float, float]:
        """The seconds per token without the draft model (0 = not measured yet), and the share of them that it saves.

        `expected` is the share that is assumed before anything is measured.
        """
        (alone, alone_tokens), (read, read_tokens) = self.totals.tolist()
        if not alone_tokens:
            return 0.0, expected
        pace = alone / alone_tokens
        with_model = (read + PRIOR_TOKENS * pace * (1 - expected)) / (read_tokens + PRIOR_TOKENS)
        return pace, 1 - with_model / pace


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
        # How many times as long the target's step, and the draft model's forward, take while both run.
        self.target_slowdown = self.draft_slowdown = 1.0
        self.answer_tokens = ANSWER_TOKENS  # of a finished answer (EMA)
        self.block = 1  # tokens that a forward of the draft model drafts
        self._acceptance = {greedy: Acceptance() for greedy in (False, True)}
        self._paces: dict[str, list[Pace]] = {}  # by drafter and sampling: of each kind of text, and of all
        self._allowance = PROBE_SECONDS  # seconds that probes may take; a pair that is known has to save them up
        self.is_corrected = False  # whether it has changed since it was loaded or saved

    def __deepcopy__(self, memo: dict[int, Any]) -> Pair:
        """Itself: all sessions share it."""
        return self

    def acceptance(self, greedy: bool) -> Acceptance:
        """The acceptance in requests that are greedy, or sample."""
        return self._acceptance[greedy]

    def record_step(self, drafter: str, greedy: bool, kind: int, is_read: bool, tokens: int, seconds: float) -> None:
        """Records a step of a drafter, without the time in which the draft model has read."""
        paces = self._paces_of(drafter, greedy)
        for pace in (paces[kind], paces[-1]):
            pace.record(is_read, tokens, seconds)

    def saved_seconds(self, drafter: str, greedy: bool, kind: int) -> float:
        """Seconds per token that the draft model saves this drafter in text of a kind, once it has read the text."""
        paces = self._paces_of(drafter, greedy)
        seconds, saved = paces[kind].saved(paces[-1].saved(PRIOR_SAVED)[1])
        return seconds * saved

    def _paces_of(self, drafter: str, greedy: bool) -> list[Pace]:
        return self._paces.setdefault(f"{drafter} {'greedy' if greedy else 'sampling'}", [Pace() for _ in range(KINDS + 1)])

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

    def record_forward(self, context: int, seconds: float, beside: bool) -> None:
        """Records a forward of the draft model over few rows after `context` tokens."""
        expected = self.forward_seconds(context)
        if not expected:
            self.draft_seconds = 0.0 if beside else seconds
        elif beside:
            self.draft_slowdown = slowdown(self.draft_slowdown, seconds / expected)
        else:
            change = ema(expected, bounded(expected, seconds)) / expected
            self.draft_seconds, self.context_seconds = self.draft_seconds * change, self.context_seconds * change

    def record_reading(self, tokens: int, seconds: float) -> None:
        """Records the reading of a prompt's tokens by the draft model."""
        self.read_seconds = ema(self.read_seconds or None, bounded(self.read_seconds or None, seconds / tokens))

    def record_beside(self, seconds: float, alone: float) -> None:
        """Records a target's forward beside the draft model, which would have taken `alone` seconds."""
        if alone > 0:
            self.target_slowdown = slowdown(self.target_slowdown, seconds / alone)

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
        paces = {name: [pace.totals.ravel().tolist() for pace in paces] for name, paces in self._paces.items()}
        return {name: getattr(self, name) for name in FIGURES} | {"acceptance": kinds, "paces": paces}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores a state. Raises ValueError if it does not fit."""
        try:
            figures = {name: float(saved[name]) for name in FIGURES}
            for greedy, each in self._acceptance.items():
                found = saved["acceptance"][str(greedy)]
                each.calibration.load({name: np.array(found[name], np.float64) for name in ("tried", "accepted")})
                each.kinds = [Share(*map(float, kind)) for kind in found["kinds"]]
                each.positions = [Share(*map(float, position)) for position in found["positions"]]
            paces = {str(name): [Pace(each) for each in found] for name, found in saved["paces"].items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if not all(0 <= value < float("inf") for value in figures.values()):
            raise ValueError("its seconds must be numbers of at least 0")
        if any(len(each) != KINDS + 1 for each in paces.values()):
            raise ValueError("its paces are of other kinds of text")
        for name, value in figures.items():
            setattr(self, name, value)
        self._paces, self._allowance = paces, 0.0


FIGURES = (
    "target_seconds",
    "draft_seconds",
    "context_seconds",
    "read_seconds",
    "target_slowdown",
    "draft_slowdown",
    "answer_tokens",
)


def slowdown(mean: float, ratio: float) -> float:
    """A slowdown after one more measurement."""
    return ema(mean, min(max(1.0, ratio), 3 * mean))


@dataclass
class Estimate:
    """The tokens and seconds that a step is expected to have with what has been drafted for it."""

    tokens: float  # that it emits
    nodes: int  # that it verifies
    drafting: float  # seconds of the drafting for it
    costs: NDArray[np.float64]  # seconds of the target's step by nodes

    @classmethod
    def of(cls, probability: Floats, costs: NDArray[np.float64], drafting: float = 0.0) -> Estimate:
        """The estimate of a step that verifies those nodes of a tree that pay, by their path probabilities, float32 [N]."""
        tokens = np.cumsum(np.r_[1.0, np.sort(probability)[::-1]])[: len(costs)]
        nodes = int(np.argmax(tokens / np.maximum(costs[: len(tokens)] + drafting, 1e-9)))
        return cls(float(tokens[nodes]), nodes, drafting, costs)

    @property
    def seconds(self) -> float:
        """Seconds of drafting and verification."""
        return self.drafting + float(self.costs[min(self.nodes, len(self.costs) - 1)])

    def rate(self, tokens: float = 0.0, seconds: float = 0.0, nodes: int = 0) -> float:
        """Tokens per second after adding expected tokens, seconds of drafting and nodes to verify."""
        verification = float(self.costs[min(self.nodes + nodes, len(self.costs) - 1)])
        return (self.tokens + tokens) / max(self.drafting + seconds + verification, 1e-9)

    def gains(self, tokens: float, seconds: float, nodes: int) -> bool:
        """Whether these raise the tokens per second."""
        return self.rate(tokens, seconds, nodes) > LEAST_GAIN * self.rate()

    def gains_from_chain(self, gain: float, path: float, share: float, forward: float, fixed: float) -> bool:
        """Whether one or more forwards of a draft model are worth their time.

        The first one adds `gain` tokens, and all that it adds is accepted with the probability `path`; each further one adds a
        token that is accepted with the probability `share`. A forward takes `forward` seconds, and what precedes it `fixed`.
        """
        for count in range(1, AHEAD + 1):
            if self.gains(gain, fixed + count * forward, count):
                return True
            path *= share
            gain += path
        return False

    def gains_from_block(self, gains: Sequence[float], seconds: float) -> bool:
        """Whether a block, which one forward drafts in `seconds`, raises the tokens per second.

        `gains` has the expected tokens that each node of the block adds.
        """
        return any(self.gains(tokens, seconds, nodes) for nodes, tokens in enumerate(accumulate(gains), start=1))
