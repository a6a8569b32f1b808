"""How much an ablation measures, and the rows of its table: plain dicts, whose keys are the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    lines: int | None = None  # of recorded answers; None = all
    modules: int | None = None  # of the standard library, as a corpus of code; None = all
    prompts: int = 12
    max_tokens: int = 128  # per answer of the embedded model
    rounds: int = 2  # of a timed comparison
    simulated_tokens: int = 300


QUICK = Size(lines=1, modules=3, prompts=2, max_tokens=12, rounds=1, simulated_tokens=12)
