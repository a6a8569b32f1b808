"""`draft`: plain speculative decoding with a draft model's chain (SSD in GSD's terms, arXiv 2407.16207)."""

from __future__ import annotations

from outrider.drafters.model.draft_tree import DraftTreeDrafter
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.options import DraftOptions


class DraftDrafter(DraftTreeDrafter):
    """A draft model's chain for one session: a tree of one branch. Implements `Drafter`."""

    def __init__(self, model: LanguageModel, options: DraftOptions) -> None:
        super().__init__(model, options.tree)
