"""Several streams in shared rounds."""

from collections.abc import Sequence

from outrider.verify.round import RunDrafts, run_round
from outrider.verify.stream import Stream


def answers_in_rounds(streams: Sequence[Stream], run_drafts: RunDrafts) -> list[list[int]]:
    """The tokens of all streams, each of which takes part in every round until it ends."""
    active, found = dict(enumerate(streams)), [list[int]() for _ in streams]
    while active:
        outcomes = run_round(list(active.values()), run_drafts=run_drafts)
        for number, outcome in zip(list(active), outcomes, strict=True):
            assert outcome is not None and not isinstance(outcome, Exception), outcome
            found[number] += outcome.tokens
            if outcome.finish:
                active.pop(number).close()
    return found
