"""The interface of caches: the committed rows of one session slot, and those of the forward after them.

A commit keeps the accepted rows; rows beyond `length` are scratch space. `outrider.verify.model.cache.tensor_cache` has a slot
in tensors, `outrider.verify.model.gpu.paged_cache` in pages of a pool, and `outrider.verify.model.llama.runner` in llama.cpp's
cache. Committed rows are in pages, which a cache, a slot that was swapped out and a session on disk share with each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.cache.shape import CacheShape

if TYPE_CHECKING:
    import torch

    from outrider.verify.model.hidden_states import StateRing
    from outrider.verify.model.recurrent.states import RecurrentStates, Snapshot

# The rows of a page in host memory: uint8 [layers, 2, kv_heads, at most PAGE_TOKENS, bytes of a stored row], or
# [1, 1, 1, at most PAGE_TOKENS, bytes of a position] if layers differ. So one form holds every data type.
HostRows = NDArray[np.uint8]
# The rows of a page: in host memory, or as a tensor of the stored data type, which may be a view.
Part: TypeAlias = "HostRows | torch.Tensor"
# Committed rows: those of a cache, or of one that was swapped out.
Rows: TypeAlias = "KVCache | SwappedRows"
# The number of positions of a page. Page n holds those from n * PAGE_TOKENS on.
PAGE_TOKENS = 256


class OutOfPages(RuntimeError):
    """The pages that a forward or a cache needs are not free. Nothing was taken, written or changed."""


def page_count(rows: int, page_tokens: int) -> int:
    return -(-rows // page_tokens)


@dataclass(eq=False)
class Page:
    """The rows of PAGE_TOKENS committed positions, which never change. All who hold a page have the same rows."""

    rows: HostRows | None = None  # once a slot with the page was swapped out
    is_whole: bool = True  # the rows are those of all layers; otherwise of those without a window
    digest: str | None = None  # of the rows, once they are in a file
    _reduced: Page | None = None

    @property
    def reduced(self) -> Page:
        """The page without the rows of layers with a window, for all who release them."""
        if self.is_whole and self._reduced is None:
            self._reduced = Page(is_whole=False)
        return self._reduced or self


@dataclass(frozen=True)
class SwappedRows:
    """The committed rows of a swapped-out slot, in host memory. Has the methods of `KVCache` that read rows."""

    all_pages: Sequence[Page]  # the last one may have fewer rows, and is not shared then
    length: int  # rows
    snapshots: Sequence[Snapshot]

    def states(self, length: int) -> Sequence[Snapshot]:
        return [each for each in self.snapshots if each.length <= length]

    @property
    def released(self) -> Collection[int]:
        return [index for index, page in enumerate(self.all_pages) if not page.is_whole]

    @property
    def pages(self) -> Sequence[Page]:
        return self.all_pages[: self.length // PAGE_TOKENS]

    def share(self, count: int) -> list[Page]:
        return list(self.pages[:count])

    def parts(self, length: int, start: int = 0) -> Iterator[Part]:
        for first in range(start, length, PAGE_TOKENS):
            rows = self.all_pages[first // PAGE_TOKENS].rows
            assert rows is not None
            yield rows[:, :, :, : length - first]


def on_host(part: Part) -> HostRows:
    """A copy of the rows of a page in host memory."""
    if isinstance(part, np.ndarray):
        return part.copy()
    from outrider.verify.model.transfer import bytes_of  # imports torch

    return bytes_of(part)


def distinct_rows(holders: Iterable[Rows]) -> int:
    """The number of rows of all holders. A page that several hold counts once."""
    pages: set[Page] = set()
    own = 0
    for rows in holders:
        pages.update(rows.pages)
        own += rows.length - len(rows.pages) * PAGE_TOKENS
    return own + len(pages) * PAGE_TOKENS


def distinct_released(holders: Iterable[Rows]) -> int:
    """The number of these rows that layers with a window have released."""
    pages: set[Page] = set()
    own = 0
    for rows in holders:
        shared = rows.pages
        pages.update(shared[index] for index in rows.released if index < len(shared))
        own += sum(index >= len(shared) for index in rows.released)
    return (own + len(pages)) * PAGE_TOKENS


def distinct_bytes(holders: Collection[Rows], shape: CacheShape) -> int:
    """The bytes of all holders' rows and states. What several hold counts once."""
    snapshots = {id(each): each.nbytes for rows in holders for each in rows.snapshots}
    released = 0 if shape.window is None else shape.windowed_bytes_for(distinct_released(holders))
    return shape.bytes_for(distinct_rows(holders)) - released + sum(snapshots.values())


# The positions of a slot beyond its context, for the rows of one draft.
MARGIN_POSITIONS = MAX_NODES + 1


class KVCache(ABC):
    """Keys and values of up to `positions` tokens, the first `length` of them committed."""

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
        """The first `length` rows page by page, from a page's first row `start` on; none of a cache that is never swapped out.

        Released pages have the layers without a window only.
        """
        return iter(())

    @property
    def released(self) -> Collection[int]:
        """Pages without the rows of layers with a window (`outrider.verify.model.cache.windows`)."""
        return ()

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """States of recurrent layers after some of these rows, as far as they are in memory."""
        return ()

    def states(self, length: int) -> Sequence[Snapshot]:
        """The states after at most `length` rows; if these are all rows, the last state is after all of them."""
        return ()

    def share(self, count: int) -> list[Page]:
        """The first `count` whole pages, for another holder of the same rows."""
        assert count * PAGE_TOKENS <= self.length
        self.pages += [Page(is_whole=index not in self.released) for index in range(len(self.pages), count)]
        return self.pages[:count]

    def swap_out(self) -> SwappedRows:
        """Empties the slot; copies the committed rows to host memory, except for pages that are there already."""
        length, shared = self.length, self.share(self.length // PAGE_TOKENS)
        snapshots = [each.on_host() for each in self.states(length)]
        if length % PAGE_TOKENS:
            shared.append(Page())
        for page, part in zip(shared, self.parts(length), strict=True):
            if page.rows is None:
                page.rows = on_host(part)
        self.truncate(0)
        return SwappedRows(shared, length, snapshots)
