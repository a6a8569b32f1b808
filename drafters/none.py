"""`none`: plain decoding."""

from outrider.drafters.interface import EMPTY, NOTHING, Corpora, DraftTree, Ints, Sampling
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import Stateless


class NoDrafter(Stateless):
    """Proposes nothing: one token per step. Implements `Drafter`."""

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        pass

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        return EMPTY
