"""A tri-gram table that drafts for a draft model: the model's next forward also verifies the tokens the table expects.

The REST paper suggests it as future work. The draft model still decides, so its draft is the same but ready sooner. While
the table's accuracy is low, it guesses rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.drafters.policy import Probe, ema
from outrider.drafters.state import State, array, join, numbers, part

# The table holds this many contexts, and evicts the least recently updated one.
CAPACITY = 1 << 16
# Nodes of a guide with a lower path probability are not used as guesses.
MIN_PATH = 0.25
# Below this share of correct guesses, the table guesses rarely.
MIN_ACCURACY = 0.4


class NgramPredraft:
    """The table of one session: learns its text and guesses the tokens that follow."""

    def __init__(self, tokens: int) -> None:
        """`tokens` is the maximum length of a guess."""
        self._max_tokens = tokens
        self._next: dict[tuple[int, int], int] = {}  # the latest successor of two tokens
        self._last: list[int] = []  # the last two tokens learned
        self._accuracy = 1.0  # share of correct guesses (EMA)
        self._probe = Probe()

    def learn(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        text = [*self._last, *tokens]
        for first, second, third in zip(text, text[1:], text[2:], strict=False):
            self._next.pop((first, second), None)
            self._next[first, second] = third
        while len(self._next) > CAPACITY:
            del self._next[next(iter(self._next))]
        self._last = text[-2:]

    def guess(self, draft: Sequence[int], guide: DraftTree = EMPTY) -> list[int]:
        """Guesses the tokens that follow the text and the `draft` after it; those in the tree `guide`, if it has any."""
        probe = self._probe.tick()
        if self._accuracy < MIN_ACCURACY and not probe:
            return []
        if path := guide.likeliest(draft, MIN_PATH):
            return path
        context = [*self._last, *draft][-2:]
        guessed: list[int] = []
        while len(guessed) < self._max_tokens and len(context) == 2:
            token = self._next.get((context[0], context[1]))
            if token is None:
                break
            guessed.append(token)
            context = [context[1], token]
        return guessed

    def record(self, guessed: int, correct: int) -> None:
        """Records how many of the guessed tokens were correct."""
        if guessed:
            self._accuracy = ema(self._accuracy, correct / guessed)

    def state(self) -> State:
        grams = [(*context, token) for context, token in self._next.items()]
        known = {"grams": np.array(grams, np.int32).reshape(-1, 3), "last": np.array([-1, -1, *self._last][-2:], np.int32)}
        return {**known, "accuracy": numbers(self._accuracy), **join(probe=self._probe.state())}

    def load(self, saved: State) -> None:
        grams = array(saved, "grams", np.int32, None, 3).tolist()
        self._next = {(first, second): third for first, second, third in grams}
        self._last = [token for token in array(saved, "last", np.int32, 2).tolist() if token >= 0]
        self._accuracy = float(array(saved, "accuracy", np.float64, 1)[0])
        self._probe.load(part(saved, "probe"))
