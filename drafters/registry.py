"""Drafters by the names users see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from drafters.draft import Drafter, NoDrafter, Verdict
from drafters.ngram import BaseArrays, empty_base
from drafters.trigram import TrigramDrafter, TrigramOptions

DrafterName = Literal["none", "trigram"]
NAMES: tuple[DrafterName, ...] = get_args(DrafterName)


@dataclass(frozen=True)
class Resources:
    """What drafters share between sessions: options and read-only tables, never anything a session learned."""

    trigram: TrigramOptions = field(default_factory=TrigramOptions)
    base: BaseArrays = field(default_factory=empty_base)


def make(name: DrafterName, resources: Resources) -> Drafter:
    """A fresh drafter for one session."""
    match name:
        case "none":
            return NoDrafter()
        case "trigram":
            return TrigramDrafter(resources.base, resources.trigram)


def warm(resources: Resources) -> None:
    """Runs every drafter once, so that no request pays for compiling its kernels."""
    prompt = np.arange(8, dtype=np.int32)
    for name in NAMES:
        drafter = make(name, resources)
        drafter.begin(prompt)
        tree = drafter.propose(8)
        drafter.observe(Verdict(tree, np.empty(0, np.int32), prompt[:1]))
        drafter.end()
