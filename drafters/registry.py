"""Creates drafters by name; saves and restores what they have learned, as arrays by name."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.draft import DraftDrafter
from outrider.drafters.draft_graph import DraftGraphDrafter
from outrider.drafters.draft_tree import DraftTreeDrafter
from outrider.drafters.fusion import FusionDrafter
from outrider.drafters.interface import Drafter, Verdict
from outrider.drafters.lookahead import LookaheadDrafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.model.schedule import Schedules
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import (
    NAMES,
    NEED_A_MODEL,
    DrafterName,
    DraftTime,
    Options,
)
from outrider.drafters.pearl import PearlDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.prompt_lookup import PromptLookupDrafter
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.sequence import Reader, Sequence
from outrider.drafters.tables.ngram import BaseArrays, empty_base
from outrider.drafters.tables.suffix import Corpus
from outrider.drafters.trigram import TrigramDrafter


@dataclass(frozen=True)
class Resources:
    """Options and read-only tables that all sessions' drafters share; holds nothing that a session learned."""

    options: Options = field(default_factory=Options)
    base: BaseArrays = field(default_factory=empty_base)
    corpus: Collection[Corpus] = ()
    vocabulary: int = 1 << 18  # token ids are below it
    model: Callable[[], LanguageModel] | None = None  # creates a session's draft model; None without a draft model
    # What all sessions measured of the draft model beside tables, by drafter.
    schedules: Mapping[DrafterName, Schedules] = field(default_factory=lambda: defaultdict(Schedules))

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
            if resources.model is None or options.fusion.draft == "never":
                return tables
            return _union(name, tables, resources.model(), resources, options.fusion.draft)
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
            if options.pearl.thrifty and options.pearl.pre_verify and options.pearl.post_verify:
                return _union(name, LookupDrafter(options.lookup), model, resources, "auto")
            return PearlDrafter(model, options.pearl)


def make_uncompiled(resources: Resources, has_prediction: bool) -> Drafter:
    """A drafter for one request whose own drafter's kernels are not compiled yet."""
    return PredictionDrafter(resources.options.prediction) if has_prediction else PromptLookupDrafter()


def _union(name: DrafterName, tables: Drafter, model: LanguageModel, resources: Resources, time: DraftTime) -> UnionDrafter:
    options = resources.options
    chain = ModelChain(model, options.pearl, choices=2)
    return UnionDrafter(tables, chain, resources.schedules[name], options.draft.gamma, time)


def arrays_of(drafter: Drafter) -> dict[str, NDArray[Any]]:
    """The writable arrays of a drafter by attribute path, without the text, draft models and tables that sessions share."""
    arrays = {id(array): (path, array) for path, array in _walk(drafter, "") if array.flags.writeable}
    return dict(arrays.values())


def fork(drafter: Drafter, memo: dict[int, Any]) -> Drafter:
    """A copy of a drafter with everything it has learned. `memo` is that of `copy.deepcopy`.

    Read-only arrays are shared: a copy would be writable, and kernels would be compiled again for its type.
    """
    memo |= {id(array): array for _, array in _walk(drafter, "") if not array.flags.writeable}
    return copy.deepcopy(drafter, memo)


def restore(drafter: Drafter, saved: Mapping[str, NDArray[Any]]) -> None:
    """Copies saved arrays into a drafter that has read the same text. Does nothing unless all names, shapes and types agree."""
    arrays = arrays_of(drafter)
    same = arrays.keys() == saved.keys() and all(
        (array.shape, array.dtype) == (saved[name].shape, saved[name].dtype) for name, array in arrays.items()
    )
    for name, array in arrays.items() if same else ():
        array[...] = saved[name]


def _walk(value: Any, path: str) -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            yield path, value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        if not hasattr(value, "__deepcopy__"):  # else all sessions share it
            for name, part in zip(value._fields, value, strict=True):
                yield from _walk(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _walk(part, f"{path}.{index}")
    elif type(value).__module__.startswith("outrider.drafters.") and not isinstance(value, Sequence | Reader):
        for name, part in vars(value).items() if hasattr(value, "__dict__") else ():
            yield from _walk(part, f"{path}.{name}")


def warm(resources: Resources, names: Collection[DrafterName] = NAMES) -> None:
    """Runs these drafters once, so that no request waits for their kernels to compile."""
    for name in (name for name in resources.names if name in names):
        drafter, sequence = make(name, resources), Sequence(np.arange(8, dtype=np.int32))
        drafter.begin(sequence)
        tree = drafter.propose(8)
        ids = np.tile(np.arange(drafter.feedback, dtype=np.int32), (len(tree) + 1, 1))
        verdict = Verdict(tree, np.empty(0, np.int32), sequence.tokens[:1], ids, np.full(ids.shape, 0.01, np.float32))
        sequence.append(verdict.tokens)
        drafter.observe(verdict)
        drafter.end()
