"""How often one session expects the target to accept the draft model's tokens, and what reading its text costs."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np

from outrider.drafters.interface import Sampling, Verdict
from outrider.drafters.model.pair import FEW_TOKENS, Acceptance, Pair, kind_of
from outrider.drafters.policy import Share, ema
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, array, numbers

# What the pair knows counts as OWN_PRIOR cases of a new session. The last OWN_CASES of its own cases count.
OWN_PRIOR, OWN_CASES = 6.0, 60.0
# A longer part of the text is read apart from the first draft: in chunks, and only if the rest of the answer repays that.
FEW_UNREAD = 16
# A probe takes at most this share of the time that the answer has taken so far, so short answers are not probed.
PROBE_SHARE_OF_ANSWER = 0.05


class Expectation:
    """Starts with what the pair knows of text of which the target is equally confident, and follows the session's own cases."""

    def __init__(self, pair: Pair, drafter: str) -> None:
        """`drafter` names what drafts beside the model."""
        self._pair, self._drafter = pair, drafter
        self._sequence = Sequence()
        self._greedy = True
        self._own: Share | None = None  # in this session
        self._confidence: float | None = None  # the target's probability of its likeliest token (EMA)
        self._seconds = 0.0  # that the request's steps have taken
        self._was_read = False  # whether the model had read the text when this step began

    @property
    def share(self) -> float:
        """The probability that the next token is accepted."""
        return self._kind.mean if self._own is None else self._own.mean

    @property
    def acceptance(self) -> Acceptance:
        """What the pair knows of requests that are greedy, or of those that sample."""
        return self._pair.acceptance(self._greedy)

    @property
    def forward_seconds(self) -> float:
        """Seconds of the model's forward over one row after the text so far."""
        return self._pair.forward_seconds(len(self._sequence))

    def begin(self, sequence: Sequence, sampling: Sampling | None) -> None:
        """Starts a request. Keeps the cases of the session's last request if both are greedy, or both sample."""
        greedy = sampling is None or sampling.greedy
        self._own = self._own if greedy == self._greedy else None
        self._sequence, self._greedy, self._seconds = sequence, greedy, 0.0

    def learn(self, was_right: bool, position: int = 0) -> None:
        """Records whether a token was accepted; `position` is its place among those of a forward."""
        self._own = self._own or Share(self._kind.mean, OWN_PRIOR, OWN_CASES)
        self._own.record(was_right)
        self.acceptance.record(self._kind, position, was_right)

    def block(self, most: int) -> list[float]:
        """The probability that each token of the next block and all before it are accepted, of at most `most` tokens."""
        positions = self.acceptance.positions[: min(self._pair.block, most)]
        return list(accumulate((min(0.999, self.share * position.mean) for position in positions), mul))

    def start_step(self, unread: int) -> None:
        """Starts a step before which the model has `unread` tokens to read."""
        self._was_read = unread <= FEW_UNREAD

    def observe(self, verdict: Verdict, seconds: float) -> None:
        """Updates the target's confidence from the accepted path, and the mean seconds per token.

        `seconds` are the step's, without the reading of the text.
        """
        self._seconds += seconds
        kind = kind_of(self._confidence)
        self._pair.record_step(self._drafter, self._greedy, kind, self._was_read, len(verdict.tokens), seconds)
        if verdict.topk_probs.size:
            rows = [0, *(verdict.path + 1).tolist()]
            for probability in verdict.topk_probs[rows, 0].tolist():
                self._confidence = ema(self._confidence, probability)

    def reading_seconds(self, unread: int) -> float:
        """Seconds that the model needs to read `unread` tokens before it drafts."""
        return unread * self._pair.read_seconds if unread > FEW_TOKENS else 0.0

    def repays_reading(self, unread: int) -> bool:
        """Whether the rest of the answer is expected to repay the reading of `unread` tokens.

        The rest is thought to be no longer than the answer so far, so a wrong guess costs no more than the model could save.
        """
        if unread <= FEW_UNREAD:
            return True
        rest = min(self._sequence.remaining, self._pair.answer_tokens, self._sequence.emitted)
        saved = self._pair.saved_seconds(self._drafter, self._greedy, kind_of(self._confidence))
        return rest * saved > self.reading_seconds(unread)

    def may_probe(self, unread: int, seconds: float) -> bool:
        """Whether there is time for a probe: a draft of `seconds` that shows how good the model is, but need not pay."""
        price = self.reading_seconds(unread) + seconds
        return price <= PROBE_SHARE_OF_ANSWER * self._seconds and self._pair.may_probe(price)

    def state(self) -> State:
        own = (0.0, 0.0, 0.0) if self._own is None else self._own.state()
        return {"own": numbers(*own, self._confidence or 0.0, self._greedy)}

    def load(self, saved: State) -> None:
        *own, confidence, greedy = array(saved, "own", np.float64, 5).tolist()
        self._own = Share(*own) if own[2] else None
        self._confidence, self._greedy = confidence or None, bool(greedy)

    @property
    def _kind(self) -> Share:
        """Acceptance in text of this kind."""
        return self.acceptance.kind(self._confidence)
