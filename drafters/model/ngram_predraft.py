"""A tri-gram table that drafts for a draft model: its next forward is over the tokens that the table expects, too.

The REST paper leaves it for later work: what helps a target helps its draft model. The model's own choices decide, so its
draft is the same; it only comes sooner. Where the table is wrong too often, it is asked rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.policy import PROBE_INTERVAL, ema

CAPACITY = 1 << 16  # contexts; the oldest go first
LEAST_RIGHT = 0.4  # of its tokens, for the table to be asked


class NgramPredraft:
    """For one session. Knows a text that grows, and guesses beyond it."""

    def __init__(self, tokens: int) -> None:
        """At most so many at once."""
        self._most = tokens
        self._next: dict[tuple[int, int], int] = {}  # what last followed two tokens
        self._last: list[int] = []  # the last two tokens that were learned
        self._right = 1.0  # share of the guessed tokens; a decaying mean
        self._asked = 0

    def learn(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        text = [*self._last, *tokens]
        for first, second, third in zip(text, text[1:], text[2:], strict=False):
            self._next.pop((first, second), None)
            self._next[first, second] = third
        while len(self._next) > CAPACITY:
            del self._next[next(iter(self._next))]
        self._last = text[-2:]

    def guess(self, beyond: Sequence[int]) -> list[int]:
        """What may follow the text and the tokens `beyond` it."""
        self._asked += 1
        if self._right < LEAST_RIGHT and self._asked % PROBE_INTERVAL:
            return []
        ending = [*self._last, *beyond][-2:]
        found: list[int] = []
        while len(found) < self._most and len(ending) == 2:
            token = self._next.get((ending[0], ending[1]))
            if token is None:
                break
            found.append(token)
            ending = [ending[1], token]
        return found

    def record(self, guessed: int, right: int) -> None:
        """Of so many guessed tokens, so many were right."""
        if guessed:
            self._right = max(ema(self._right, right / guessed), 1e-6)
