"""`draft`: plain speculative decoding with a draft model (SSD in GSD's terms, arXiv 2407.16207): a tree of one branch."""

from __future__ import annotations

from drafters.draft_tree import DraftTreeDrafter
from drafters.model.language_model import LanguageModel
from drafters.options import DraftOptions


class DraftDrafter(DraftTreeDrafter):
    """`draft`: a chain, plain speculative decoding (SSD)."""

    def __init__(self, model: LanguageModel, options: DraftOptions) -> None:
        super().__init__(model, options.tree)
