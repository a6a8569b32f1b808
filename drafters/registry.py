"""Creates drafters by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from drafters.sequence import Sequence
from drafters.tables.ngram import BaseArrays, empty_base
from drafters.tables.suffix import Corpus
from drafters.trigram import TrigramDrafter


@dataclass(frozen=True)
class Resources:
    """Options and read-only tables that all sessions' drafters share; holds nothing that a session learned."""

    options: Options = field(default_factory=Options)
    base: BaseArrays = field(default_factory=empty_base)
    corpus: Collection[Corpus] = ()
    vocabulary: int = 1 << 18  # token ids are below it
    model: Callable[[], LanguageModel] | None = None  # creates a session's draft model; None without a draft model

    @property
    def names(self) -> tuple[DrafterName, ...]:
        """The drafters that can be created."""
        return tuple(name for name in NAMES if self.model is not None or name not in NEED_A_MODEL)


def make(name: DrafterName, resources: Resources) -> Drafter:
    """A new drafter for one session."""
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
    """Runs every drafter once, so that no request waits for its kernels to compile."""
    for name in resources.names:
        drafter, sequence = make(name, resources), Sequence(np.arange(8, dtype=np.int32))
        drafter.begin(sequence)
        tree = drafter.propose(8)
        ids = np.tile(np.arange(drafter.feedback, dtype=np.int32), (len(tree) + 1, 1))
        verdict = Verdict(tree, np.empty(0, np.int32), sequence.tokens[:1], ids, np.full(ids.shape, 0.01, np.float32))
        sequence.append(verdict.tokens)
        drafter.observe(verdict)
        drafter.end()
