"""Ends an editor's completion at a line of less indentation, or at the end of a line once its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.server.openai.generation import Cut


class LineLimits:
    """llama-server's `n_indent` and `t_max_predict_ms`. Implements `outrider.server.openai.generation.Stop`."""

    def __init__(self, indent: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`indent`: least number of spaces and tabs that a line begins with, except the first; an empty line has none.

        `seconds`: time from the first text on; 0 = no limit.
        """
        self._indent = indent
        self._seconds = seconds
        self._clock = clock
        self._started: float | None = None
        # Spaces at the beginning of the current line; None after them, and in the first line.
        self._spaces: int | None = None

    def feed(self, text: str) -> Cut | None:
        now = self._clock()
        self._started = now if self._started is None else self._started
        is_late = 0 < self._seconds < now - self._started
        for at, character in enumerate(text):
            if self._spaces is not None and character in " \t":
                self._spaces += 1
                continue
            if self._spaces is not None and self._spaces < self._indent:
                return Cut(at, "length")
            if is_late and character == "\n":
                return Cut(at + 1, "length")
            self._spaces = 0 if character == "\n" else None
        return None
