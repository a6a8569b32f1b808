"""Several requests in shared rounds."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.verify.generation import Generation
from outrider.verify.round import Round, Together


def answers_in_rounds(generations: Sequence[Generation], together: Together) -> list[list[int]]:
    """The tokens of all requests, each of which takes part in every round until it ends."""
    active, found = dict(enumerate(generations)), [list[int]() for _ in generations]
    while active:
        outcomes = Round(list(active.values()), together=together).end()
        for number, outcome in zip(list(active), outcomes, strict=True):
            assert outcome is not None and not isinstance(outcome, Exception), outcome
            found[number] += outcome.tokens
            if outcome.finish:
                active.pop(number).close()
    return found
