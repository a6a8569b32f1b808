"""How long rounds may take that read parts of prompts beside steps."""

from __future__ import annotations

from drafters.policy import bounded, ema

READING_FACTOR = 2.0  # by default, such a round takes at most this multiple of a round without a prompt


class Pace:
    """The times of the rounds of one worker."""

    def __init__(self, max_seconds: float | None = None) -> None:
        """`max_seconds` bounds rounds that read prompts; None = READING_FACTOR times a round without a prompt."""
        self._max_seconds = max_seconds
        self._seconds: dict[int, float] = {}  # of a round without a prompt (EMA), by number of steps
        self._error = 1.0  # measured over predicted time of rounds that read prompts (EMA)

    def limit(self, steps: int, predicted: float) -> float:
        """The predicted time that a round may have; `predicted` is that of its steps, and counts until some were measured."""
        seconds = self._max_seconds or READING_FACTOR * self._seconds.get(steps, predicted * self._error)
        return seconds / self._error

    def record(self, steps: int, seconds: float) -> None:
        """Records a round without a prompt."""
        mean = self._seconds.get(steps, 0.0)
        self._seconds[steps] = ema(mean, bounded(mean, seconds))

    def record_reading(self, predicted: float, seconds: float) -> None:
        """Records a round that read a part of a prompt beside steps."""
        self._error = ema(self._error, bounded(self._error, seconds / predicted))
