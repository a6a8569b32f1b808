"""Drafters by the names users see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from drafters.draft import DraftDrafter
from drafters.draft_graph import DraftGraphDrafter
from drafters.draft_tree import DraftTreeDrafter
from drafters.fusion import FusionDrafter
from drafters.interface import Drafter, Verdict
from drafters.lookahead import LookaheadDrafter
from drafters.lookup import LookupDrafter
from drafters.model.language_model import LanguageModel
from drafters.model.union import UnionDrafter
from drafters.none import NoDrafter
from drafters.options import (
    NAMES,
    NEED_A_MODEL,
    DrafterName,
    Options,
)
from drafters.pearl import PearlDrafter
from drafters.prediction import PredictionDrafter
from drafters.retrieval import RetrievalDrafter
from drafters.tables.ngram import BaseArrays, empty_base
from drafters.tables.suffix import Corpus
from drafters.trigram import TrigramDrafter


@dataclass(frozen=True)
class Resources:
    """What drafters share between sessions: options and read-only tables, never anything a session learned."""

    options: Options = field(default_factory=Options)
    base: BaseArrays = field(default_factory=empty_base)
    corpus: Sequence[Corpus] = ()
    vocabulary: int = 1 << 18  # a number that no token reaches
    model: Callable[[], LanguageModel] | None = None  # a draft model for one more session, where there is one

    @property
    def names(self) -> tuple[DrafterName, ...]:
        """The drafters that can be made."""
        return tuple(name for name in NAMES if self.model is not None or name not in NEED_A_MODEL)


def make(name: DrafterName, resources: Resources) -> Drafter:
    """A fresh drafter for one session."""
    options = resources.options
    match name:
        case "none":
            return NoDrafter()
        case "trigram":
            return TrigramDrafter(resources.base, options.trigram)
        case "retrieval":
            return RetrievalDrafter(resources.corpus, options.retrieval)
        case "lookup":
            return LookupDrafter(options.lookup)
        case "lookahead":
            return LookaheadDrafter(options.lookahead)
        case "prediction":
            return PredictionDrafter(options.prediction)
        case "fusion":
            tables = FusionDrafter(resources.base, resources.corpus, options.fusion, resources.vocabulary)
            return tables if resources.model is None else UnionDrafter(tables, DraftDrafter(resources.model(), options.draft))
    assert resources.model is not None, f"{name} needs a draft model"
    model = resources.model()
    match name:
        case "draft":
            return DraftDrafter(model, options.draft)
        case "draft-tree":
            return DraftTreeDrafter(model, options.draft_tree)
        case "draft-graph":
            return DraftGraphDrafter(model, options.draft_graph)
        case "pearl":
            return PearlDrafter(model, options.pearl)


def warm(resources: Resources) -> None:
    """Runs every drafter once, so that no request pays for compiling its kernels."""
    prompt = np.arange(8, dtype=np.int32)
    for name in resources.names:
        drafter = make(name, resources)
        drafter.begin(prompt)
        tree = drafter.propose(8)
        ids = np.tile(np.arange(drafter.feedback, dtype=np.int32), (len(tree) + 1, 1))
        drafter.observe(Verdict(tree, np.empty(0, np.int32), prompt[:1], ids, np.full(ids.shape, 0.01, np.float32)))
        drafter.end()
