"""`prediction`: drafts from the output that the client expects (OpenAI's Predicted Outputs), typically a file to edit.

When the answer departs from the prediction, the drafter realigns: it looks for the last emitted tokens in the prediction,
nearest to its last position.
"""

import numpy as np

from outrider.drafters.interface import EMPTY, NOTHING, Corpora, DraftTree, Ints, Sampling, Source, Verdict, chain
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import Stateless

# The tokens that are drafted per step.
LENGTH = 32
# The emitted tokens by which the position is found again.
MEMORY = 8
# The assumed probability that the next predicted token is accepted while the answer follows the prediction.
CERTAINTY = 0.97
# A match of a single token counts only within this many tokens.
MAX_JUMP = 32


class PredictionDrafter(Stateless):
    """Prediction for one session; drafts nothing in requests without a prediction. Implements `Drafter`."""

    def __init__(self) -> None:
        self._expected = NOTHING
        self._position = 0  # position of the next expected token
        self._sequence = Sequence()

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._expected = np.asarray(prediction, np.int32)
        self._position = 0
        self._sequence = sequence

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        tokens = self._expected[self._position : self._position + min(budget, LENGTH)]
        if not len(tokens):
            return EMPTY
        steps = np.arange(1, len(tokens) + 1, dtype=np.float32)
        return chain(tokens, np.float32(CERTAINTY) ** steps, Source.PREDICTION)

    def observe(self, verdict: Verdict) -> None:
        if not len(self._expected):
            return
        tokens = verdict.tokens
        expected = self._expected[self._position : self._position + len(tokens)]
        followed = np.array_equal(expected, tokens)
        self._position = self._position + len(tokens) if followed else self._realign(self._position + len(tokens))

    def end(self) -> None:
        self._expected = NOTHING

    def _realign(self, near: int) -> int:
        emitted = self._sequence.answer[-MEMORY:]
        return realign(self._expected, emitted, near)


def realign(expected: Ints, emitted: Ints, near: int) -> int:
    """The position in `expected` after the longest match of the end of `emitted`; of equal matches, the nearest to `near`.

    A match of a single token counts only within MAX_JUMP tokens of `near`. Without a match it is `near`: the emitted tokens
    are assumed to replace the same number of expected ones.
    """
    for n in range(min(len(emitted), len(expected)), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(expected, n)
        ends = np.flatnonzero((windows == emitted[len(emitted) - n :]).all(1)) + n
        if n == 1:
            ends = ends[np.abs(ends - near) <= MAX_JUMP]
        if len(ends):
            return int(ends[np.argmin(np.abs(ends - near))])
    return near
