"""How long rounds may take that read parts of prompts beside steps."""

from __future__ import annotations

from drafters.policy import bounded, ema

READING_FACTOR = 1.8  # default limit of a round that reads a prompt, as a multiple of the usual time of rounds without one


class Pace:
    """The time limit of rounds that read prompts. Predicted times are corrected by the times that rounds have taken."""

    def __init__(self, max_seconds: float | None = None) -> None:
        """`max_seconds` bounds rounds that read prompts; None = READING_FACTOR times the usual time of their steps."""
        self._max_seconds = max_seconds
        self._usual = 0.0  # seconds of rounds without prompts (EMA), or of what such a round would have taken
        self._errors = {reads: 1.0 for reads in (False, True)}  # measured over predicted time (EMA)

    def limit(self, predicted: float) -> float:
        """The predicted time that the next round may have, which reads a prompt.

        `predicted` is that of its steps without the prompt.
        """
        self._usual = ema(self._usual, predicted * self._errors[False])
        return (self._max_seconds or READING_FACTOR * self._usual) / self._errors[True]

    def record(self, reads: bool, predicted: float, seconds: float) -> None:
        """Records a round, and whether it read a prompt beside steps."""
        error = self._errors[reads]
        self._errors[reads] = ema(error, bounded(error, seconds / predicted))
        if not reads:
            self._usual = ema(self._usual, predicted * self._errors[False])
