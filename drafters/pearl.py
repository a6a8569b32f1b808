"""`pearl`: the draft model goes on drafting while the target verifies (PEARL, arXiv 2408.11850, Algorithm 2).

A guess is what is believed to follow the committed text. Each step verifies the guess there is and, beside it, drafts on
where it ends. If all that is emitted agrees with the longer guess, its rest is the next step's guess (post-verify); if not,
the next step verifies nothing while a new guess is drafted, so that the target's own token checks the first one in advance
(pre-verify). Only token ids and what was accepted cross between the two models.

How long a guess gets depends on time, so under the rule `rejection` a seed does not give the same answer again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np

from drafters.interface import EMPTY, NOTHING, DraftTree, Floats, Ints, Sampling, Source, Verdict, chain
from drafters.model.calibration import Calibration
from drafters.model.language_model import LanguageModel
from drafters.model.ngram_predraft import NgramPredraft
from drafters.options import MAX_WINDOW, PearlOptions
from drafters.policy import ema


class PearlDrafter:
    """PEARL for one session. Implements `Drafter`: what runs beside the verifier starts in `propose` and ends in `observe`."""

    feedback = 0

    def __init__(self, model: LanguageModel, options: PearlOptions) -> None:
        self._model = model
        self._options = options
        self._calibration = Calibration(1)
        self._guess: list[int] = []  # all but its last token are rows of the model
        self._shares: list[float] = []  # the model's probability of each
        self._ahead = NgramPredraft(options.ahead)
        self._draft_seconds = 0.0  # of a token; a decaying mean
        self._verify_seconds = 0.0  # of a step
        self._beside: Future[None] | None = None
        self._enough = threading.Event()  # the verifier is done: no more tokens
        self.drafted_tokens = 0  # in all, as the next two
        self.accepted_tokens = 0  # guesses that came true, those checked by the target's own token, too
        self.rejections = 0

    @property
    def window(self) -> int:
        """How many tokens are drafted in the time of one verification."""
        if self._options.window:
            return self._options.window
        measured = self._draft_seconds > 0 and self._verify_seconds > 0
        ratio = self._verify_seconds / self._draft_seconds if measured else self._model.speed_ratio
        return max(1, min(MAX_WINDOW, round(ratio)))

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._stop()
        self._forget()
        self._model.beside(lambda: self._model.begin(prompt, sampling)).result()
        self._ahead.learn(prompt.tolist())

    def propose(self, budget: int) -> DraftTree:
        if budget <= 0:
            return EMPTY
        if not self._guess and not self._options.pre_verify:
            self._draft(self.window)
            assert self._beside is not None
            self._beside.result()
        proposed = self._guess[:budget]
        tree = self._chain(proposed)
        if self._options.post_verify or not proposed:
            self._draft(self.window)
        return tree

    def observe(self, verdict: Verdict) -> None:
        self._stop()
        tokens = verdict.tokens
        self._learn(tokens)
        self._ahead.learn(tokens.tolist())
        if self._guess[: len(tokens)] == tokens.tolist():
            self._guess, self._shares = self._guess[len(tokens) :], self._shares[len(tokens) :]
        else:
            self._forget()
        self._verify_seconds = ema(self._verify_seconds, verdict.seconds)
        self._model.beside(lambda: self._model.advance(tokens)).result()

    def end(self) -> None:
        self._stop()

    def _draft(self, count: int) -> None:
        """Starts drafting so many tokens more."""
        self._enough.clear()
        self._beside = self._model.beside(lambda: self._work(count))

    def _work(self, count: int) -> None:
        """Drafts on where the guess ends, one forward after the other, until there are enough tokens."""
        wanted, drafted = len(self._guess) + count, 0
        while len(self._guess) < wanted and self._model.space and not (drafted and self._enough.is_set()):
            started = time.perf_counter()
            new = self._forward(min(wanted - len(self._guess), self._model.space) - 1)
            self._draft_seconds = ema(self._draft_seconds, (time.perf_counter() - started) / new)
            drafted += new
        self.drafted_tokens += drafted

    def _forward(self, most_ahead: int) -> int:
        """One forward of the model; returns how many tokens longer the guess is."""
        row = len(self._guess)
        if not row:
            expected, found = [], self._model.root(1)
        else:
            expected = self._ahead.guess(self._guess)[:most_ahead]
            found = self._model.expand([self._guess[-1], *expected], range(row - 1, row + len(expected)), 1)
        choices = found.tokens[:, 0].tolist()
        right = next((at for at, token in enumerate(expected) if choices[at] != token), len(expected))
        self._guess += choices[: right + 1]
        self._shares += found.probability[: right + 1, 0].tolist()
        if right < len(expected):
            self._model.retract(len(self._guess))  # all but the last one are rows
        self._ahead.record(len(expected), right)
        return right + 1

    def _stop(self) -> None:
        """Waits until nothing is drafted."""
        self._enough.set()
        if self._beside is not None:
            beside, self._beside = self._beside, None
            beside.result()

    def _forget(self) -> None:
        self._guess, self._shares = [], []

    def _chain(self, tokens: list[int]) -> DraftTree:
        accepted = [self._calibration.accepted(0, share) for share in self._shares[: len(tokens)]]
        path: Floats = np.cumprod(np.array(accepted, np.float32), dtype=np.float32)
        return chain(np.array(tokens, np.int32), path, Source.DRAFT)

    def _learn(self, tokens: Ints) -> None:
        """How far the guess agreed with what was emitted."""
        for token, guess, share in zip(tokens.tolist(), self._guess, self._shares, strict=False):
            self._calibration.record([0], [share], 0 if token == guess else None)
            if token != guess:
                self.rejections += 1
                return
            self.accepted_tokens += 1
