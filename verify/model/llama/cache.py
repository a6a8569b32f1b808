"""The rows of a session in llama.cpp's cache: a sequence, and while a draft tree is verified, one more for each leaf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import HostRows, KVCache, OutOfPages, Rows, page_count
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.llama.library import MOST_ROWS, LlamaContext


class SequencePool:
    """llama.cpp's cache, the numbers of its sequences, and the positions that sessions may take."""

    def __init__(self, context: LlamaContext, shape: CacheShape, pages: int) -> None:
        self.context, self.shape, self.pages = context, shape, pages
        self.scratch, *self._free = range(context.sequences)
        self.used = 0  # pages of all sessions
        self.caches = 0

    @property
    def free(self) -> int:
        """Pages that no session takes. Those that several share count for each: they may part."""
        return self.pages - self.used

    @property
    def nodes(self) -> int:
        """The nodes that a tree of each session may have, so that sequences for all leaves are left."""
        most = self.context.sequences - 1
        return (most - self.caches) // max(1, self.caches)

    def reserve(self, wanted: Sequence[tuple[LlamaCache, int]]) -> None:
        """Makes room for each cache's number of new rows. Raises OutOfPages, and changes none of them then."""
        missing = sum(cache.missing_pages(rows) for cache, rows in wanted)
        if missing > self.free:
            raise OutOfPages(f"{missing} more pages of llama.cpp's cache are needed, and {self.free} are free.")
        for cache, rows in wanted:
            cache.hold(rows)

    def take(self) -> int:
        """The number of an empty sequence."""
        return self._free.pop()

    def give_back(self, sequence: int) -> None:
        self.context.remove(sequence, 0)
        self._free.append(sequence)


class LlamaCache(KVCache):
    """A `KVCache` whose rows are a sequence of llama.cpp's cache."""

    def __init__(self, pool: SequencePool, positions: int) -> None:
        self.pool, self.positions = pool, positions
        self.pages = []
        self.sequence = pool.take()
        pool.caches += 1
        self._leaves: dict[int, int] = {}  # sequences by the row of their leaf, after the forward of a tree
        self._ancestors = np.zeros((0, 0), np.bool_)  # of the tree's rows
        self._taken = 0  # pages
        self._length = 0
        self._end = 0  # positions that the sequence may have, those after `length` included

    def __del__(self) -> None:
        if hasattr(self, "_taken"):
            self._drop_leaves()
            self.pool.used -= self._taken
            self.pool.caches -= 1
            self.pool.give_back(self.sequence)

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        self._take(page_count(length, kv_cache.PAGE_TOKENS))

    def _take(self, pages: int) -> None:
        self.pool.used += pages - self._taken
        self._taken = pages

    def missing_pages(self, rows: int) -> int:
        return max(0, page_count(self.length + rows, kv_cache.PAGE_TOKENS) - self._taken)

    def reserve(self, rows: int) -> None:
        """See `KVCache`. Raises OutOfPages."""
        self.pool.reserve([(self, rows)])

    def hold(self, rows: int) -> None:
        """Takes the pages for `rows` rows after the committed ones."""
        self._take(self._taken + self.missing_pages(rows))

    def release(self) -> None:
        """Drops the rows of the last forward that were not committed."""
        self._drop_leaves()
        if self._end > self.length:
            self.pool.context.remove(self.sequence, self.length)
            self._end = self.length

    def place(self, batch: ForwardBatch) -> list[list[int]]:
        """The sequences of each row that is computed next: of all leaves below it."""
        self._end = self.length + int(batch.depths.max()) + 1
        if batch.ancestors is None:
            return [[self.sequence]] * len(batch)
        self._ancestors = batch.ancestors
        first, *others = _leaves(batch)
        self._leaves = {first: self.sequence}
        for leaf in others:
            self._leaves[leaf] = self.pool.take()
            if self.length:
                self.pool.context.copy(self.sequence, self._leaves[leaf], 0, self.length)
        below = self._ancestors[list(self._leaves)]  # [leaves, rows]
        sequences = np.array(list(self._leaves.values()))
        return [sequences[column].tolist() for column in below.T]

    def commit(self, rows: list[int]) -> None:
        """See `KVCache`; the rows are a path from the root."""
        start, end = self.length, self.length + len(rows)
        for leaf, sequence in self._leaves.items():
            if self._ancestors[leaf, rows[-1]]:
                if sequence != self.sequence:
                    self.pool.context.remove(self.sequence, start)
                    self.pool.context.copy(sequence, self.sequence, start, end)
                    self._end = end
                break
        self.length = end
        self.release()

    def _drop_leaves(self) -> None:
        for sequence in self._leaves.values():
            if sequence != self.sequence:
                self.pool.give_back(sequence)
        self._leaves = {}

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        self.release()
        del self.pages[self.length // kv_cache.PAGE_TOKENS :]

    def fill(self, length: int, noise: Any = None) -> None:
        """See `KVCache`; computes the rows of a text of zeros."""
        self.truncate(0)
        self.reserve(length)
        for start in range(0, length, MOST_ROWS):
            positions = np.arange(start, min(start + MOST_ROWS, length), dtype=np.int32)
            kept = np.zeros(len(positions), np.bool_)
            kept[-1] = True
            self.pool.context.forward(np.zeros_like(positions), positions, [[self.sequence]] * len(positions), kept)
        self.length = self._end = length

    def assume(self, length: int) -> None:
        """See `KVCache`; there are only the rows that were computed."""
        self.truncate(length)

    def fork(self, source: Rows, length: int) -> None:
        """See `KVCache`. Rows that are not in llama.cpp's cache are restored in whole pages."""
        self.truncate(0)
        length = min(length, source.length)
        if isinstance(source, LlamaCache):
            self.pool.context.copy(source.sequence, self.sequence, 0, length)
        else:
            if length < source.length:
                length = length // kv_cache.PAGE_TOKENS * kv_cache.PAGE_TOKENS
            self.reserve(length)
            for start, part in zip(range(0, length, kv_cache.PAGE_TOKENS), source.parts(length), strict=True):
                assert isinstance(part, np.ndarray)
                end, saved = start + part.shape[3], part.reshape(-1)
                self.pool.context.restore(self.sequence, self.pool.scratch, start, end, saved)
        self.length = self._end = length
        self.pages = source.share(length // kv_cache.PAGE_TOKENS)

    def parts(self, length: int, start: int = 0) -> Iterator[HostRows]:
        """See `KVCache`; llama.cpp's saved bytes of each page."""
        for first in range(start, length, kv_cache.PAGE_TOKENS):
            end = min(first + kv_cache.PAGE_TOKENS, length)
            found = np.zeros((1, 1, 1, end - first, self.pool.shape.bytes_for(1)), np.uint8)
            saved = self.pool.context.save(self.sequence, self.pool.scratch, first, end)
            found.reshape(-1)[: len(saved)] = saved
            yield found


def _leaves(batch: ForwardBatch) -> list[int]:
    """The rows that no other row attends to."""
    assert batch.ancestors is not None
    return [int(row) for row in np.flatnonzero(batch.ancestors.sum(0) == 1)]
