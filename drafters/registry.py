"""Creates drafters by name, new or with what was saved of them."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.fusion import FusionDrafter
from outrider.drafters.interface import Drafter
from outrider.drafters.lookahead import LookaheadDrafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.draft_tree import DraftGraphDrafter, DraftTreeDrafter
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.model.pair import RANKS, Pair
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import INSTALLED, NAMES, NEED_A_MODEL, DrafterName, Options
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, StateError, array
from outrider.drafters.tables.base_table import BaseArrays, empty_base
from outrider.drafters.tables.suffix import Corpus
from outrider.drafters.trigram import TrigramDrafter

# The version of the drafters' saved states increases when a name, a shape or a meaning changes.
LAYOUT = 1


@dataclass(frozen=True)
class Resources:
    """Options and read-only tables that all sessions' drafters share; holds nothing that a session learned."""

    options: Options = field(default_factory=Options)
    base: BaseArrays = field(default_factory=empty_base)
    corpus: Collection[Corpus] = ()
    vocabulary: int = 1 << 18  # token ids are below it
    model: Callable[[], LanguageModel] | None = None  # creates a session's draft model; None without a draft model
    pair: Pair = field(default_factory=Pair)  # what is known of the draft model beside its target

    @property
    def names(self) -> tuple[DrafterName, ...]:
        return tuple(name for name in NAMES if self.model is not None or name not in NEED_A_MODEL)


def make(name: DrafterName, resources: Resources) -> Drafter:
    if name in INSTALLED:
        drafter: Drafter = INSTALLED[name].load()(resources)
        return drafter
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
            return PredictionDrafter()
        case "fusion":
            tables = FusionDrafter(resources.base, resources.corpus, options.fusion, resources.vocabulary)
            if resources.model is None or options.fusion.draft == "never":
                return tables
            time = options.fusion.draft
            chain = ModelChain(resources.model(), resources.pair, RANKS)
            return UnionDrafter(tables, chain, resources.pair, options.draft.steps, time, time == "auto")
    assert resources.model is not None, f"{name} needs a draft model"
    model, pair, steps = resources.model(), resources.pair, options.draft.steps
    match name:
        case "draft":
            return UnionDrafter(NoDrafter(), ModelChain(model, pair), pair, steps, "before", options.draft.only_if_worth)
        case "draft-tree":
            return DraftTreeDrafter(model, options.draft_tree, pair)
        case "draft-graph":
            return DraftGraphDrafter(model, options.draft_graph, pair)
        case "pearl":
            if options.pearl.only_if_worth:
                return UnionDrafter(LookupDrafter(options.lookup), ModelChain(model, pair, RANKS), pair, steps)
            chain = ModelChain(model, pair, window=options.pearl.window)  # the paper's algorithm
            return UnionDrafter(NoDrafter(), chain, pair, steps, "during", only_if_worth=False)
    raise ValueError(f"There is no drafter {name!r}; choose one of {', '.join(resources.names)}.")


def clone(drafter: Drafter, text: Sequence, cloned: Sequence) -> Drafter:
    """A drafter for another session that has learned the same. What reads `text` in this one reads `cloned` in the other."""
    return copy.deepcopy(drafter, {id(text): cloned})


def arrays_of(drafter: Drafter) -> dict[str, NDArray[Any]]:
    """The arrays to save: the drafter's state and the layout version."""
    return {"layout": np.array([LAYOUT]), **drafter.state()}


def load(name: DrafterName, resources: Resources, saved: State, text: Sequence) -> Drafter:
    """A new drafter with saved arrays, for a session with this text. Raises StateError."""
    layout = int(array(saved, "layout", np.int64, 1)[0]) if "layout" in saved else 0
    if layout != LAYOUT:
        raise StateError(f"its layout is {layout}, and this version reads layout {LAYOUT}")
    drafter = make(name, resources)
    drafter.load(saved, text)
    return drafter
