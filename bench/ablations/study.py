"""What an ablation is: a table or figure of a paper, its claim, and the cases that are measured for it.

The rows of a table are plain dicts, and the columns are their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.ablations.material import Material
from bench.ablations.size import Row

Paper = Literal["aded", "rest", "gsd", "pearl"]
PAPERS: dict[Paper, str] = {"aded": "ADED / Adaptix", "rest": "REST", "gsd": "GSD", "pearl": "PEARL"}


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
    needs_recordings: bool = False
    wide: bool = False  # printed with a column per row: a sweep

    @property
    def paper(self) -> Paper:
        """The paper that it belongs to."""
        return next(paper for paper in PAPERS if self.name.startswith(paper))
