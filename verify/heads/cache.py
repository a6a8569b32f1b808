"""A draft head's cache: rows of the text's end, which a cache of their own holds from its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.paging import Part, Rows
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.hidden import StateRing


class HeadCache(KVCache):
    """The head's keys and values of a text from `first` on, in `rows`, and its own states of the last of them."""

    def __init__(self, rows: TensorCache) -> None:
        self.rows, self.positions = rows, rows.positions
        self.pages = []
        self.source: StateRing | None = None  # the target's states of the text
        self.first = 0  # rows before it are absent: the target's states that they read were not kept
        self.exact = 0  # rows before it read the target's states; later ones the head's own

    @property
    def length(self) -> int:
        """The text's committed tokens, with those whose rows are absent."""
        return self.first + self.rows.length

    @length.setter
    def length(self, length: int) -> None:
        self.rows.length = length - self.first

    def skip(self, length: int) -> None:
        """Takes `length` positions to be committed, without their rows."""
        self.rows.truncate(0)
        self.first = self.exact = length

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on."""
        self.rows.truncate(max(0, length - self.first))
        self.first = min(self.first, length)
        self.exact = min(self.exact, self.length)

    def commit(self, rows: list[int]) -> None:
        self.rows.commit(rows)

    def fork(self, source: Rows, length: int) -> None:
        assert isinstance(source, HeadCache)
        self.rows.fork(source.rows, max(0, length - source.first))
        self.first = min(source.first, length)
        self.exact = min(source.exact, self.length)

    def fill(self, length: int, noise: Any = None) -> None:
        self.first = 0
        self.rows.fill(length, noise)

    def assume(self, length: int) -> None:
        self.first = 0
        self.rows.assume(length)

    def missing_pages(self, rows: int) -> int:
        return self.rows.missing_pages(rows)

    def reserve(self, rows: int) -> None:
        self.rows.reserve(rows)

    def release(self) -> None:
        self.rows.release()

    def discard(self) -> None:
        self.rows.discard()

    def parts(self, length: int, start: int = 0) -> Iterator[Part]:
        return self.rows.parts(length - self.first, start)
