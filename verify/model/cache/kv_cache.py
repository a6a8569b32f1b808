"""The interface of caches: the committed rows of one session slot, and those of the forward after them.

A commit keeps the accepted rows; rows beyond `length` are scratch space. `outrider.verify.model.cache.tensor_cache` has a slot
in tensors, `outrider.verify.model.gpu.paged_cache` in pages of a pool, and `outrider.verify.model.llama.cache` in llama.cpp's
cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.cache import paging
from outrider.verify.model.cache.paging import Page, Part, Rows, SwappedRows

if TYPE_CHECKING:
    from outrider.verify.model.hidden import StateRing
    from outrider.verify.model.recurrent.states import RecurrentStates, Snapshot

# The positions of a slot beyond its context, for the rows of one draft.
MARGIN_POSITIONS = MAX_NODES + 1


class KVCache(ABC):
    """Keys and values of up to `positions` tokens, the first `length` of them committed. Implements `Rows`."""

    positions: int
    length: int
    pages: list[Page]  # those of `share` that no truncation has reached
    recurrent: RecurrentStates | None = None  # states of recurrent layers
    hidden: StateRing | None = None  # hidden states that a draft head reads

    def discard(self) -> None:  # noqa: B027
        """Returns the memory of an empty cache to the system, if it takes any."""

    def missing_pages(self, rows: int) -> int:
        """Pages of a pool to take before `rows` more rows can be written; none where a slot has its memory."""
        return 0

    def reserve(self, rows: int) -> None:  # noqa: B027
        """Makes room for `rows` rows after the committed ones. A cache in pages raises OutOfPages, and is unchanged then."""

    @abstractmethod
    def fill(self, length: int, noise: Any = None) -> None:
        """Replaces the contents with a text of this length, for measurements."""

    @abstractmethod
    def assume(self, length: int) -> None:
        """Takes `length` positions to be committed, whatever they hold, for measurements."""

    def release(self) -> None:  # noqa: B027
        """Returns the memory of rows that no later row reads, if there is much of it."""

    @abstractmethod
    def commit(self, rows: list[int]) -> None:
        """Commits the rows at `length + r` for r in `rows` (ascending)."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on, and possibly some before it, too."""

    @abstractmethod
    def fork(self, source: Rows, length: int) -> None:
        """Replaces the contents with the first `length` committed rows of `source`, or with as many as can be had."""

    def parts(self, length: int, start: int = 0) -> Iterator[Part]:
        """See `Rows`; none of a cache that is neither swapped out nor saved."""
        return iter(())

    @property
    def released(self) -> Collection[int]:
        """See `Rows`."""
        return ()

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """See `Rows`."""
        return ()

    def states(self, length: int) -> Sequence[Snapshot]:
        """See `Rows`."""
        return ()

    def share(self, count: int) -> list[Page]:
        """The first `count` whole pages, for another holder of the same rows."""
        assert count * paging.PAGE_TOKENS <= self.length
        self.pages += [Page(is_whole=index not in self.released) for index in range(len(self.pages), count)]
        return self.pages[:count]

    def swap_out(self) -> SwappedRows:
        """Empties the slot; copies the committed rows to host memory, except for pages that are there already."""
        length, shared = self.length, self.share(self.length // paging.PAGE_TOKENS)
        snapshots = [each.on_host() for each in self.states(length)]
        if length % paging.PAGE_TOKENS:
            shared.append(Page())
        for page, part in zip(shared, self.parts(length), strict=True):
            if page.rows is None:
                page.rows = paging.on_host(part)
        self.truncate(0)
        return SwappedRows(shared, length, snapshots)
