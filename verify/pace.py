"""How long rounds may take that read parts of prompts beside steps."""

from __future__ import annotations

from drafters.policy import bounded, ema

READING_FACTOR = 2.0  # default limit of a round that reads a prompt, as a multiple of the time of its steps


class Pace:
    """The time limit of rounds that read prompts. Predicted times are corrected by the times that rounds have taken."""

    def __init__(self, max_seconds: float | None = None) -> None:
        """`max_seconds` bounds rounds that read prompts; None = READING_FACTOR times the time of their steps."""
        self._max_seconds = max_seconds
        self._errors = {reads: 1.0 for reads in (False, True)}  # measured over predicted time (EMA)

    def limit(self, predicted: float) -> float:
        """The predicted time that a round may have that reads a prompt; `predicted` is that of its steps without one."""
        seconds = self._max_seconds or READING_FACTOR * predicted * self._errors[False]
        return seconds / self._errors[True]

    def record(self, reads: bool, predicted: float, seconds: float) -> None:
        """Records a round, and whether it read a prompt beside steps."""
        error = self._errors[reads]
        self._errors[reads] = ema(error, bounded(error, seconds / predicted))
