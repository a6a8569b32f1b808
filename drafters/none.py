"""`none`: plain decoding."""

from __future__ import annotations

from outrider.drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Verdict
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import Stateless


class NoDrafter(Stateless):
    """Proposes nothing: one token per step. Implements `Drafter`."""

    feedback = 0
    prunable = True

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        pass

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        return EMPTY

    def observe(self, verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass
