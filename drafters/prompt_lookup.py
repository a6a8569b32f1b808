"""Drafts what followed the last occurrence of the text's last tokens (prompt lookup), in numpy alone.

Stands in for the other drafters where the package was installed without its compiled library.
"""

from __future__ import annotations

import numpy as np

from outrider.drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Source, chain
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import Stateless

SHORTEST, LONGEST = 2, 8
LENGTH = 10


class PromptLookupDrafter(Stateless):
    """Prompt lookup in one request's text; learns nothing. Implements `Drafter`."""

    def __init__(self) -> None:
        self._sequence = Sequence()

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._sequence = sequence

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        text = self._sequence.tokens
        start, length = last_match(text)
        tokens = text[start : start + min(budget, LENGTH)]
        if length < SHORTEST or not len(tokens):
            return EMPTY
        certainty = np.float32(length / (length + 1))
        return chain(tokens.copy(), certainty ** np.arange(1, len(tokens) + 1, dtype=np.float32), Source.LOOKUP)


def last_match(text: Ints) -> tuple[int, int]:
    """Finds the last earlier occurrence of the text's longest repeated ending of at most LONGEST tokens: (end, length)."""
    found = np.empty(0, np.int64)  # ends of the earlier occurrences of the last `length` tokens
    for length in range(1, min(LONGEST + 1, len(text))):
        ends = np.arange(length, len(text)) if length == 1 else found[found >= length]
        longer = ends[text[ends - length] == text[-length]]
        if not len(longer):
            return (int(found[-1]), length - 1) if len(found) else (0, 0)
        found = longer
    return (int(found[-1]), min(LONGEST, len(text) - 1)) if len(found) else (0, 0)
