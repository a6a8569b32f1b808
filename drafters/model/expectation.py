"""How often one session expects the target to accept the draft model's tokens, and what reading its text costs."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np

from outrider.drafters.interface import EMPTY, MAX_NODES, DraftTree, Floats, Sampling, Verdict, Work
from outrider.drafters.model.pair import FEW_TOKENS, Acceptance, Estimate, Pair, Savings, cost_of, kind_of
from outrider.drafters.policy import Share, ema
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, array, numbers

# What the pair knows counts as OWN_PRIOR cases of a new session. The last OWN_CASES of its own cases count.
OWN_PRIOR, OWN_CASES = 6.0, 60.0
# A longer part of the text is read apart from the first draft: in chunks, and only if the rest of the answer repays that.
FEW_UNREAD = 16
# Probes take at most this share of the time that the answer has taken so far, so short answers are not probed.
ANSWER_SHARE = 0.15


class Expectation:
    """Starts with what the pair knows of text of which the target is equally confident, and follows the session's own cases."""

    def __init__(self, pair: Pair, drafter: str) -> None:
        """`drafter` names what drafts beside the model."""
        self._pair, self._drafter = pair, drafter
        self._sequence = Sequence()
        self._greedy = True
        self._own: Share | None = None  # in this session
        self._confidence: float | None = None  # the target's probability of its likeliest token (EMA)
        self._seconds = 0.0  # that the request's steps have taken, without the reading of the text
        self._probed = 0.0  # seconds of the request's probes
        self._was_read = False  # whether the model had read the text when this step began
        self.costs = pair.step_seconds(0)  # seconds of the target's step, by nodes

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
        self._sequence, self._greedy, self._seconds, self._probed = sequence, greedy, 0.0, 0.0

    def learn(self, was_right: bool, position: int = 0) -> None:
        """Records whether a token was accepted; `position` is its place among those of a forward."""
        self._own = self._own or Share(self._kind.mean, OWN_PRIOR, OWN_CASES)
        self._own.record(was_right)
        self.acceptance.record(self._kind, position, was_right)

    def block(self, most: int, share: float | None = None) -> list[float]:
        """The probability that each token of the next block and all before it are accepted, of at most `most` tokens.

        The session's own acceptance counts unless `share` is given.
        """
        share = self.share if share is None else share
        positions = self.acceptance.positions[: min(self._pair.block, most)]
        return list(accumulate((min(0.999, share * position.mean) for position in positions), mul))

    def start_step(self, unread: int) -> None:
        """Starts a step before which the model has `unread` tokens to read."""
        self._was_read = unread <= FEW_UNREAD
        self.costs = self._pair.step_seconds(len(self._sequence))

    def observe(self, verdict: Verdict, work: Work, without: DraftTree, waits: tuple[float, float] = (0.0, 0.0)) -> None:
        """Learns what a step has taken, what the model has saved if it had read the text, and the target's confidence.

        Without the model, the step would have verified the tree `without`. The verification has waited for the model for the
        first of `waits`, and the next step for the second, in seconds. What else the verification took is the measure of both
        steps, as the machine's speed varies.
        """
        verification, cost = verdict.seconds - waits[0], cost_of(len(verdict.tree), self.costs)
        seconds = work.seconds + verification + sum(waits)
        self._seconds += seconds
        self._pair.save_for_probes(seconds + work.invested)
        if cost > 0 and verification > 0:
            self._pair.record_verification(verification / cost, work)
            if self._was_read and not work.invested:  # a probe is no sign of what drafts that pay save
                tokens = min(len(verdict.tokens), 1 + len(without.follow(verdict.tokens)))
                alone = verification / work.slowdown * cost_of(len(without), self.costs) / cost
                self._savings.record(len(verdict.tokens), seconds, tokens, alone)
        if verdict.topk_probs.size:
            rows = [0, *(verdict.path + 1).tolist()]
            for probability in verdict.topk_probs[rows, 0].tolist():
                self._confidence = ema(self._confidence, probability)

    def estimate(self, probability: Floats, drafting: float = 0.0) -> Estimate:
        """The estimate of this step with nodes of these path probabilities, whose drafting took `drafting` seconds."""
        return Estimate.of(probability, self.costs, drafting, self._pair.after_slowdown)

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
        saved = self._saved(rest, self._savings.share(self._expected_share(self.share)))
        return saved > self.reading_seconds(unread)

    def _saved(self, tokens: float, share: float) -> float:
        """Seconds saved in these tokens at the answer's pace, if the model saves this share of the time per token."""
        return tokens * share * self._seconds / max(1, self._sequence.emitted)

    def _expected_share(self, acceptance: float) -> float:
        """The share of the time per token that the model saves without tables, by its price and this acceptance."""
        step = self.estimate(EMPTY.probability)
        if self._pair.block > 1:
            rates = step.after_block(self.block(MAX_NODES, acceptance), self.forward_seconds)
        else:
            rates = step.after_chain(acceptance, acceptance, acceptance, self.forward_seconds)
        return max(0.0, 1 - step.rate() / max(rates))

    def may_probe(self, unread: int, seconds: float) -> bool:
        """Whether there is time for a probe: a draft of `seconds` that shows how good the model is, but need not pay.

        With an acceptance one standard deviation above its mean, an answer of the usual length must repay the probe.
        """
        price = self.reading_seconds(unread) + seconds
        if self._probed + price > ANSWER_SHARE * self._seconds or not self._pair.may_probe(price):
            return False
        best = self._expected_share(min(1.0, self.share + self._kind.deviation))
        return self._saved(min(self._sequence.remaining, self._pair.answer_tokens), best) > price

    def spend(self, seconds: float) -> None:
        """Records what a probe has taken."""
        self._probed += seconds
        self._pair.spend(seconds)

    def state(self) -> State:
        own = (0.0, 0.0, 0.0) if self._own is None else self._own.state()
        return {"own": numbers(*own, self._confidence or 0.0, self._greedy)}

    def load(self, saved: State) -> None:
        *own, confidence, greedy = array(saved, "own", np.float64, 5).tolist()
        self._own = Share(*own) if own[2] else None
        self._confidence, self._greedy = confidence or None, bool(greedy)

    @property
    def _savings(self) -> Savings:
        """What the model saves in text of this kind."""
        return self._pair.savings(self._drafter, self._greedy, kind_of(self._confidence))

    @property
    def _kind(self) -> Share:
        """Acceptance in text of this kind."""
        return self.acceptance.kind(self._confidence)
