"""How much an ablation measures, and the rows of its table: plain dicts, whose keys are the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    name: Literal["full", "quick"]
    lines: int | None  # of each recording; None = all
    modules: int | None  # of the standard library, as a corpus of code; None = all
    prompts: int
    max_tokens: int  # per answer of the embedded model
    rounds: int  # of a timed comparison
    simulated_tokens: int


FULL = Size("full", None, None, prompts=8, max_tokens=96, rounds=3, simulated_tokens=300)
QUICK = Size("quick", 1, 3, prompts=2, max_tokens=12, rounds=1, simulated_tokens=12)
