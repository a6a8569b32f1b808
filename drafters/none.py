"""`none`: plain decoding."""

from __future__ import annotations

from drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Verdict


class NoDrafter:
    """`none`: plain decoding, one token a step."""

    feedback = 0

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        pass

    def propose(self, budget: int) -> DraftTree:
        return EMPTY

    def observe(self, verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass
