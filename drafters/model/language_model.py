"""What drafters need of a small language model: what may follow a text, and the rows of a tree below it, level by level.

The model is handed in; nothing here knows how it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from drafters.interface import Floats, Ints, Sampling

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Candidates:
    """What may follow each of R rows: the model's own choice first, K in all."""

    tokens: Ints  # int32 [R, K]
    probability: Floats  # float32 [R, K]; in the distribution that they are drawn from; 0 = no candidate
    q: NDArray[np.float32] | None = None  # float32 [R, V]; that distribution, where the request's rule wants to see it


class LanguageModel(Protocol):
    """A draft model at work for one session. It has read the committed text; rows of a tree stand below its end.

    Row 0 is the last committed token; the others are numbered as they are added.
    """

    @property
    def speed_ratio(self) -> float:
        """Seconds of a target's step over seconds of one of its own (PEARL's c), as measured at the start."""

    def begin(self, text: Ints, sampling: Sampling | None = None) -> None:
        """A request starts: int32 [P]. What the model has read of it already is kept."""

    @property
    def space(self) -> int:
        """How many more rows there can be; 0 where the model can say nothing about the text."""

    def root(self, count: int) -> Candidates:
        """Reads what it has not read yet and drops all rows but the first; `count` candidates for what follows it."""

    def expand(self, tokens: Sequence[int], parents: Sequence[int], count: int) -> Candidates:
        """Adds R <= `space` rows, each below an earlier one, in one forward; `count` candidates for each of them."""

    def retract(self, rows: int) -> None:
        """Forgets all but the first `rows` rows."""

    def advance(self, tokens: Ints) -> None:
        """Tokens (int32 [A+1]) are committed. Rows that they follow are kept: what they hold is not computed again."""

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the model's own thread, beside whatever the target does."""
