"""`pearl`: the draft model keeps drafting while the target verifies (PEARL, arXiv 2408.11850, Algorithm 2).

Each step verifies the current chain while the model extends it. If the emitted tokens agree with it, its rest is the next
step's draft (post-verify). If not, the next step verifies no draft while the model drafts anew, so the target's own token
checks the first draft token early (pre-verify).
"""

from __future__ import annotations

from outrider.drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.sequence import Sequence


class PearlDrafter(ModelChain):
    """PEARL for one session. Implements `Drafter`: background drafting starts in `propose` and ends in `observe`."""

    feedback = 0
    prunable = True

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self.start(sequence, sampling)

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if budget <= 0:
            return EMPTY
        if not len(self) and not self._options.pre_verify:
            self.draft(self.window)
        tree = self.tree(budget)
        if self._options.post_verify or not len(tree):
            self.draft_during()
        return tree
