"""The interface to a draft model: candidates for the next token, and the rows of a tree below the text, level by level.

Defines the interface only; the implementation is passed to the drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outrider.drafters.interface import Floats, Ints, Sampling
from outrider.drafters.sequence import Sequence

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Candidates:
    """K candidates for the token after each of R rows, in the model's own order."""

    tokens: Ints  # int32 [R, K]
    probability: Floats  # float32 [R, K]; in the distribution that they are sampled from; 0 = no candidate
    q: Floats | None = None  # float32 [R, V]; that distribution, if the acceptance rule needs it


class LanguageModel(Protocol):
    """A session's draft model. It reads the committed text and computes the rows of a tree below its end.

    Row 0 is the last committed token; other rows are numbered as they are added.
    """

    @property
    def is_sequential(self) -> bool:
        """Whether a chain of rows takes a forward for each row, so that it checks other drafts no faster than it drafts."""

    def begin(self, text: Sequence, sampling: Sampling | None = None) -> None:
        """Starts a request whose prompt is the text so far. A prefix that the model has read already is not read again."""

    @property
    def unread(self) -> int:
        """The number of the text's tokens that `root` would read, at least 1."""

    def read(self, tokens: int) -> int:
        """Reads at most `tokens` of them, if there are many; returns how many it has read."""

    @property
    def space(self) -> int:
        """The number of rows that can be added; 0 if the model cannot draft for this text."""

    def root(self, count: int) -> Candidates:
        """Reads unread text and drops all rows but the first; returns `count` candidates for the token after it."""

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        """Adds R <= `space` rows below earlier ones; returns `count` candidates for each.

        It takes one forward, or one for each level if the model is sequential.
        """

    def retract(self, rows: int) -> None:
        """Drops all but the first `rows` rows."""

    def advance(self, tokens: Ints) -> None:
        """Commits emitted tokens, int32 [A+1], which the text ends with. Rows along them are not computed again."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the model's own thread, concurrently with the target."""
