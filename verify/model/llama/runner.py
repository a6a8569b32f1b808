"""The model runner whose forwards llama.cpp computes.

The rows of a session are a sequence of llama.cpp's cache, and while a draft tree is verified, one more for each leaf.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES
from outrider.verify.errors import ModelError
from outrider.verify.gguf import llama_package
from outrider.verify.model.batch import ForwardBatch, Segment, grouped, kept_rows, positions_of, tokens_of
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS, HostRows, KVCache, OutOfPages, Rows, page_count
from outrider.verify.model.cache.shape import CacheShape, LayerShape
from outrider.verify.model.llama import library
from outrider.verify.model.llama.library import KV_NAMES, KV_TYPES, MOST_ROWS, LlamaContext, LlamaModel
from outrider.verify.model.memory import HOST, keep_freed_memory
from outrider.verify.model.runner import ModelRunner

# Sessions that are in the cache, unless settings ask for more: attention reads past the rows of all of them.
MOST_CACHES = 4
# The contexts that the cache of all sessions has room for. llama.cpp takes its memory at once.
CONTEXTS, LEAST_PAGES = 2, 8


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


class LlamaRunner(ModelRunner):
    """A GGUF file that llama.cpp has loaded. Has the interface of `ModelRunner`, without a model of transformers."""

    can_assume, most_caches = False, MOST_CACHES
    in_pages = True  # sessions share the positions of one cache
    max_rows = MOST_ROWS

    def __init__(self, file: Path, context_tokens: int | None = None, kv_dtype: str = "auto", on_gpu: bool = True) -> None:
        """Call `start` before any other method. Raises ModelError."""
        if kv_dtype not in KV_TYPES:
            raise ModelError(f"model.kv_dtype is {kv_dtype}, which llama.cpp's cache does not have; set it to auto or int8.")
        self.llama = LlamaModel(file, on_gpu)
        if not self.llama.is_decoder:
            raise ModelError(f"The model in {file.name!r} does not continue texts; name a causal language model.")
        if self.llama.keeps_states:
            raise ModelError(
                f"Layers of the model in {file.name!r} keep states, from which llama.cpp takes no draft back; set model.backend"
                " to outrider."
            )
        self.device = HOST  # of the logits
        self.vocabulary, self.weight_bytes = self.llama.vocabulary, self.llama.weight_bytes
        self.held_bytes = self.weight_bytes
        self.weight_bits = round(8 * self.weight_bytes / max(1, self.llama.weights), 2)
        self.model_tokens = self.llama.context_tokens
        self.context_tokens = min(self.model_tokens, context_tokens or self.model_tokens)
        self.stop_tokens, self.library, self.kernels = self.llama.ends, library.name(), library.name()
        self.description = f"{file.name}, {self.llama.description}, {library.name()}"
        self._kv_dtype = kv_dtype
        self.cache_shape = self._probe()
        self.invariance = "off: the bits of llama.cpp's logits depend on the rows beside them"
        self._sequences: SequencePool | None = None

    def _probe(self) -> CacheShape:
        """The bytes that llama.cpp saves of one position, its header included. Raises ModelError if logits are NaN."""
        context = LlamaContext(self.llama, kv_cache.PAGE_TOKENS, 1, self._kv_dtype, 2)
        logits = context.forward(np.zeros(1, np.int32), np.zeros(1, np.int32), [[0]], np.ones(1, np.bool_))
        if not np.isfinite(logits).any():
            raise ModelError(f"llama.cpp computes NaN for {self.description}; check its weights.")
        return CacheShape((LayerShape(1, len(context.save(0, 1, 0, 1)), 0),), np.dtype(np.uint8), self.device)

    def start(self, context_tokens: int) -> None:
        self.context_tokens = min(self.model_tokens, context_tokens)
        self._sequences = None  # frees its memory first
        full = page_count(self._positions, kv_cache.PAGE_TOKENS)
        most = max(CONTEXTS * full, LEAST_PAGES)
        pages = most if self.pages is None else max(full, min(self.pages, most))
        threads = self.threads or os.cpu_count() or 1
        sequences = llama_package.library().llama_max_parallel_sequences()
        context = LlamaContext(self.llama, pages * kv_cache.PAGE_TOKENS, threads, self._kv_dtype, sequences)
        self._sequences = SequencePool(context, self.cache_shape, pages)
        keep_freed_memory()

    @property
    def _positions(self) -> int:
        return self.context_tokens + MARGIN_POSITIONS

    @property
    def free_pages(self) -> int | None:
        """Pages of llama.cpp's cache that no session takes."""
        return None if self._sequences is None else self._sequences.free

    @property
    def dtypes(self) -> tuple[str, str]:
        return "float32", KV_NAMES[self._kv_dtype]

    @property
    def draft_nodes(self) -> int:
        """See `ModelRunner`; each session may have a sequence for every node."""
        assert self._sequences is not None
        return min(MAX_NODES, self._sequences.nodes)

    def new_cache(self) -> KVCache:
        assert self._sequences is not None
        return LlamaCache(self._sequences, self._positions)

    def forward_all(self, segments: Sequence[Segment]) -> list[NDArray[np.float32]]:
        """`ModelRunner.forward_all` by several forwards if the rows are too many for one."""
        caches = [cast(LlamaCache, each.cache) for each in segments]
        for cache in caches:
            cache.release()
        assert self._sequences is not None
        self._sequences.reserve([(cache, segment.rows) for cache, segment in zip(caches, segments, strict=True)])
        groups = grouped(segments, MOST_ROWS)
        found: list[NDArray[np.float32]] = []
        for group in groups:
            logits = self._together(group)
            ends = np.cumsum([segment.kept for segment in group])
            found += np.split(logits if len(groups) == 1 else logits.copy(), ends[:-1])
        return found

    def _together(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        assert self._sequences is not None
        sequences = [each for segment in segments for each in cast(LlamaCache, segment.cache).place(segment.batch)]
        tokens, positions = tokens_of(segments).astype(np.int32), positions_of(segments).astype(np.int32)
        kept = np.zeros(len(tokens), np.bool_)
        kept[kept_rows(segments)] = True
        return self._sequences.context.forward(tokens, positions, sequences, kept)
