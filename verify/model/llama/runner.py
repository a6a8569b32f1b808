"""The model runner whose forwards llama.cpp computes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES
from outrider.verify.errors import ModelError
from outrider.verify.gguf import llama_package
from outrider.verify.model.batch import Segment, grouped, kept_rows, positions_of, tokens_of
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS, KVCache, page_count
from outrider.verify.model.cache.shape import CacheShape, LayerShape
from outrider.verify.model.llama import library
from outrider.verify.model.llama.cache import LlamaCache, SequencePool
from outrider.verify.model.llama.library import KV_NAMES, KV_TYPES, MOST_ROWS, LlamaContext, LlamaModel
from outrider.verify.model.memory import HOST, keep_freed_memory
from outrider.verify.model.runner import ModelRunner

# Sessions that are in the cache, unless settings ask for more: attention reads past the rows of all of them.
MOST_CACHES = 4
# The contexts that the cache of all sessions has room for. llama.cpp takes its memory at once.
CONTEXTS, LEAST_PAGES = 2, 8


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
