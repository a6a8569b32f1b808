"""The cache of a model whose layers keep states: llama.cpp cannot take tokens back from them.

So a step keeps the states before it in another sequence. If some of its rows are not accepted, it returns to those states, and
the accepted rows are computed again. Sessions go on where they ended, and begin anew elsewhere; none is swapped out or saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import HostRows, Page, Rows, SwappedRows
from outrider.verify.model.llama.cache import LlamaCache, SequencePool


class StatefulCache(LlamaCache):
    """A `LlamaCache` for chains of drafts."""

    def __init__(self, pool: SequencePool, positions: int) -> None:
        super().__init__(pool, positions)
        self._before: int | None = None  # the sequence with the states before the last forward, if several rows were computed
        self._tokens = np.zeros(0, np.int32)  # of that forward
        self._filled: tuple[int, int] | None = None  # length and sequence of a text for measurements

    def __del__(self) -> None:
        if hasattr(self, "_filled"):
            self._keep(None)
            if self._filled is not None:
                self.pool.give_back(self._filled[1])
        super().__del__()

    def _keep(self, sequence: int | None) -> None:
        """Keeps these states instead of those before the last forward."""
        if self._before is not None:
            self.pool.give_back(self._before)
        self._before = sequence

    def _copied(self) -> int:
        found = self.pool.take()
        self.pool.context.copy(self.sequence, found, 0, -1)
        return found

    def _return_to(self, sequence: int) -> None:
        self.pool.context.remove(self.sequence, 0)
        self.pool.context.copy(sequence, self.sequence, 0, -1)

    def _compute(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], start: int) -> None:
        kept = np.zeros(len(tokens), np.bool_)
        kept[-1] = True
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        self.pool.context.forward(tokens, positions, [[self.sequence]] * len(tokens), kept)

    def place(self, batch: ForwardBatch) -> list[list[int]]:
        """See `LlamaCache`; the batch is a chain."""
        self._keep(self._copied() if len(batch) > 1 and self.length else None)
        self._tokens = batch.tokens.astype(np.int32)
        self._end = self.length + len(batch)
        return [[self.sequence]] * len(batch)

    def commit(self, rows: list[int]) -> None:
        """See `KVCache`; computes the rows again unless all of the last forward are accepted."""
        start = self.length
        if start + len(rows) < self._end:
            self._return()
            self._compute(self._tokens[rows], start)
        self._end = self.length = start + len(rows)
        self._keep(None)

    def _return(self) -> None:
        """Returns to the states before the last forward."""
        if self._before is not None:
            self._return_to(self._before)
        else:
            self.pool.context.remove(self.sequence, 0)
            self._end = self.length = 0

    def release(self) -> None:
        """See `LlamaCache`. All rows are dropped if the states before them are missing."""
        if self._end > self.length:
            length = self.length
            self._return()
            self._end = self.length = length if self._before is not None else 0
        self._keep(None)

    def truncate(self, length: int) -> None:
        """See `KVCache`; drops everything if it has to drop anything."""
        self.release()
        if length < self.length:
            self.pool.context.remove(self.sequence, 0)
            self._end = self.length = 0

    def fill(self, length: int, noise: Any = None) -> None:
        """See `LlamaCache`; `assume` returns to this text."""
        super().fill(length, noise)
        if self._filled is not None:
            self.pool.give_back(self._filled[1])
        self._filled = length, self._copied()

    def assume(self, length: int) -> None:
        """See `KVCache`; only to the length of `fill`."""
        assert self._filled is not None and length == self._filled[0]
        self._keep(None)
        self._return_to(self._filled[1])
        self._end = self.length = length

    def fork(self, source: Rows, length: int) -> None:
        """See `KVCache`; copies the whole source, or nothing."""
        self.truncate(0)
        if isinstance(source, StatefulCache) and length >= source.length:
            source.release()
            self.pool.context.copy(source.sequence, self.sequence, 0, -1)
            self._end = self.length = source.length

    def swap_out(self) -> SwappedRows:
        """Empties the slot. The text is read again."""
        self.truncate(0)
        return SwappedRows([], 0, [])

    def share(self, count: int) -> list[Page]:
        """No pages: states are not cut."""
        return []

    def parts(self, length: int, start: int = 0) -> Iterator[HostRows]:
        """None: such sessions are not saved."""
        return iter(())
