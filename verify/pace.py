"""How long rounds may take that read parts of prompts beside steps."""

from __future__ import annotations

import math

from outrider.drafters.policy import bounded, ema

FIRST_CHUNK_TOKENS = 64  # of a prompt that is read alone, until the time of its tokens is known
MIN_CHUNK_TOKENS = 8  # of a prompt that is read beside steps, or alone but slowly
READING_FACTOR = 1.8  # default limit of a round that reads a prompt, as a multiple of the usual time of rounds without one


class Pace:
    """The time limit of rounds that read prompts. Predicted times are corrected by the times that rounds have taken."""

    def __init__(self, max_seconds: float | None = None, silent_seconds: float = math.inf) -> None:
        """`max_seconds` bounds rounds that read prompts; None = READING_FACTOR times the usual time of their steps.

        `silent_seconds` bounds those without steps, at whose end the worker shows that it makes progress.
        """
        self._max_seconds = max_seconds
        self._silent_seconds = silent_seconds
        self._token_seconds = 0.0  # of the latest round that only read prompts; 0 = unknown
        self._usual = 0.0  # seconds of rounds without prompts (EMA), or of what such a round would have taken
        self._errors = {reads: 1.0 for reads in (False, True)}  # measured over predicted time (EMA)

    def limit(self, predicted: float) -> float:
        """The predicted time that the next round may have, which reads a prompt.

        `predicted` is that of its steps without the prompt.
        """
        self._usual = ema(self._usual, predicted * self._errors[False])
        return (self._max_seconds or READING_FACTOR * self._usual) / self._errors[True]

    def chunk(self, most: int) -> int:
        """The tokens of prompts that a round without steps reads, at most `most`."""
        if self._silent_seconds == math.inf:
            return most
        if not self._token_seconds:
            return min(most, FIRST_CHUNK_TOKENS)
        return int(min(most, max(MIN_CHUNK_TOKENS, self._silent_seconds / self._token_seconds)))

    def record_chunk(self, tokens: int, seconds: float) -> None:
        """Records a round that only read prompts."""
        self._token_seconds = seconds / tokens

    def record(self, reads: bool, predicted: float, seconds: float) -> None:
        """Records a round, and whether it read a prompt beside steps."""
        error = self._errors[reads]
        self._errors[reads] = ema(error, bounded(error, seconds / predicted))
        if not reads:
            self._usual = ema(self._usual, predicted * self._errors[False])
