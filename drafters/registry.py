"""Drafters by the names users see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from drafters.draft import Drafter, NoDrafter, Verdict
from drafters.fusion import FusionDrafter, FusionOptions
from drafters.lookahead import LookaheadDrafter, LookaheadOptions
from drafters.lookup import LookupDrafter, LookupOptions
from drafters.ngram import BaseArrays, empty_base
from drafters.prediction import PredictionDrafter, PredictionOptions
from drafters.retrieval import RetrievalDrafter, RetrievalOptions
from drafters.suffix import Corpus
from drafters.trigram import TrigramDrafter, TrigramOptions

DrafterName = Literal["none", "trigram", "retrieval", "lookup", "lookahead", "prediction", "fusion"]
NAMES: tuple[DrafterName, ...] = get_args(DrafterName)


@dataclass(frozen=True)
class Options:
    """How each drafter works."""

    trigram: TrigramOptions = field(default_factory=TrigramOptions)
    retrieval: RetrievalOptions = field(default_factory=RetrievalOptions)
    lookup: LookupOptions = field(default_factory=LookupOptions)
    lookahead: LookaheadOptions = field(default_factory=LookaheadOptions)
    prediction: PredictionOptions = field(default_factory=PredictionOptions)
    fusion: FusionOptions = field(default_factory=FusionOptions)


@dataclass(frozen=True)
class Resources:
    """What drafters share between sessions: options and read-only tables, never anything a session learned."""

    options: Options = field(default_factory=Options)
    base: BaseArrays = field(default_factory=empty_base)
    corpus: Sequence[Corpus] = ()
    vocabulary: int = 1 << 18  # a number that no token reaches


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
            return FusionDrafter(resources.base, resources.corpus, options.fusion, resources.vocabulary)


def warm(resources: Resources) -> None:
    """Runs every drafter once, so that no request pays for compiling its kernels."""
    prompt = np.arange(8, dtype=np.int32)
    for name in NAMES:
        drafter = make(name, resources)
        drafter.begin(prompt)
        tree = drafter.propose(8)
        drafter.observe(Verdict(tree, np.empty(0, np.int32), prompt[:1]))
        drafter.end()
