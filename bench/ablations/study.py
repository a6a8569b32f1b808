"""What an ablation is: a table or figure of a paper, its claim, and the cases that are measured for it.

Knows nothing about drafters or models. The rows of a table are plain dicts, and the columns are their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from bench.ablations.material import Material

Paper = Literal["aded", "rest", "gsd", "pearl"]
PAPERS: dict[Paper, str] = {"aded": "ADED / Adaptix", "rest": "REST", "gsd": "GSD", "pearl": "PEARL"}
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


FULL = Size("full", None, None, prompts=12, max_tokens=128, rounds=3, simulated_tokens=300)
QUICK = Size("quick", 1, 3, prompts=2, max_tokens=12, rounds=1, simulated_tokens=12)


@dataclass(frozen=True)
class Case:
    """One row."""

    labels: Row
    measure: Callable[[Material], Row]
    published: Row = field(default_factory=dict)  # the paper's figures, beside the measured ones


@dataclass(frozen=True)
class Ablation:
    """One table or figure."""

    name: str  # such as "aded-table-2"
    title: str
    claim: str  # what the paper says, in one or two sentences
    cases: Sequence[Case]
    needs: Literal["recordings", "models", "nothing"]
    timed: bool = False  # figures depend on the machine and on what else it does
    wide: bool = False  # printed with a column per row: a sweep
    plotted: tuple[str, ...] = ()  # columns to plot over the first label

    @property
    def paper(self) -> Paper:
        """The paper that it belongs to."""
        return next(paper for paper in PAPERS if self.name.startswith(paper))
