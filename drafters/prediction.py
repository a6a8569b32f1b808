"""`prediction`: follows the text that the client expects to read (OpenAI's Predicted Outputs), typically a file to edit.

Where the answer departs from it, the drafter finds its place again from the last tokens emitted, nearest to where it was.
"""

from __future__ import annotations

import numpy as np

from drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Source, Verdict, chain
from drafters.options import PredictionOptions


class PredictionDrafter:
    """Prediction for one session; silent in requests that bring none. Implements `Drafter`."""

    feedback = 0

    def __init__(self, options: PredictionOptions) -> None:
        self._options = options
        self._expected = NOTHING
        self._at = 0  # the next expected token
        self._emitted = NOTHING  # the answer's last tokens

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._expected = np.asarray(prediction, np.int32)
        self._at = 0
        self._emitted = NOTHING

    def propose(self, budget: int) -> DraftTree:
        tokens = self._expected[self._at : self._at + min(budget, self._options.length)]
        if not len(tokens):
            return EMPTY
        steps = np.arange(1, len(tokens) + 1, dtype=np.float32)
        return chain(tokens, np.float32(self._options.certainty) ** steps, Source.PREDICTION)

    def observe(self, verdict: Verdict) -> None:
        if not len(self._expected):
            return
        tokens = verdict.tokens
        self._emitted = np.concatenate([self._emitted, tokens])[-self._options.memory :]
        expected = self._expected[self._at : self._at + len(tokens)]
        followed = np.array_equal(expected, tokens)
        # Where nothing matches, the emitted tokens are taken for substitutes of as many expected ones.
        self._at = self._at + len(tokens) if followed else realign(self._expected, self._emitted, self._at + len(tokens))

    def end(self) -> None:
        self._expected = NOTHING


def realign(expected: Ints, emitted: Ints, near: int) -> int:
    """The position in `expected` after its longest match with the end of `emitted`; of several the one nearest to `near`.

    A single token counts only within 32 tokens of `near`; where nothing matches, `near` itself.
    """
    for n in range(min(len(emitted), len(expected)), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(expected, n)
        ends = np.flatnonzero((windows == emitted[len(emitted) - n :]).all(1)) + n
        if n == 1:
            ends = ends[np.abs(ends - near) <= 32]
        if len(ends):
            return int(ends[np.argmin(np.abs(ends - near))])
    return near
