"""The model runner whose forwards the compiled library computes, from packed weights alone: steps, and chunks of prompts.

A row's logits have the same bits whatever other rows are computed beside it, so drafts, other streams and the cutting of
prompts change no answer (attention.h and multiply.h say why).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.model.adapter import Adapter, AdapterWeights, LowRank, UnfitAdapter
from outrider.verify.model.batch import ForwardBatch, Segment, grouped, keep_hidden
from outrider.verify.model.cache.host_cache import HostCache
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS
from outrider.verify.model.cache.shape import CacheShape, KVDtype, LayerShape
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.decoder import Decoder, ordered
from outrider.verify.model.cpu.native.library import Engine, variant
from outrider.verify.model.cpu.native.packed_file import in_huge_pages
from outrider.verify.model.cpu.native.states import NativeStates, shape_of
from outrider.verify.model.cpu.native.structures import CachedPart, Stream, Tap
from outrider.verify.model.cpu.native.weights import Kind, Weights
from outrider.verify.model.memory import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, HOST, INT8, HostType, keep_freed_memory
from outrider.verify.model.runner import ModelRunner

if TYPE_CHECKING:
    import torch

# The library's numbers of the data types of keys and values.
STORED = {FLOAT32: 0, BFLOAT16: 1, INT8: 2, FLOAT16: 3, FLOAT8: 4}
CODED: dict[KVDtype, HostType | None] = {"auto": None, "int8": INT8, "fp8": FLOAT8}
# The tokens that are read at a start, to see that the weights compute numbers.
CHECKED_TOKENS = 4
MOST_ROWS, MOST_STREAMS = 4096, 64


@dataclass(frozen=True, eq=False)
class NativeAdapter(Adapter):
    """An adapter as the library takes it, and what this refers to."""

    description: structures.Adapter
    kept: list[object]


class NativeRunner(ModelRunner):
    """A packed decoder. A row's logits have the same bits beside any others, by construction."""

    device = HOST
    invariance = "on, by construction"
    is_invariant = is_steady = True
    max_rows = MOST_ROWS

    def __init__(
        self,
        decoder: Decoder,
        path: str,
        dtype: HostType,
        stop_tokens: frozenset[int],
        context_tokens: int | None = None,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        """`dtype` is that of keys and values, unless `kv_dtype` names another. Call `start` before any other method."""
        known = decoder.architecture
        self.decoder, self.path = decoder, path
        self.weight_bytes = self.held_bytes = decoder.size.nbytes
        self.weight_bits = round(8 * self.weight_bytes / max(1, decoder.size.weights), 2)
        self.vocabulary = decoder.head.outputs
        self.description, self.library = repr(known), f"compiled library for {variant()}"
        self.kernels = self.library
        self.hidden, self.depth = known.hidden, len(known.layers)
        self.stop_tokens = stop_tokens
        self.model_tokens = known.context_tokens
        self.context_tokens = min(self.model_tokens, context_tokens or self.model_tokens)
        layers = tuple(
            LayerShape(each.kv_heads, each.head_dim, 0 if each.latent else each.head_dim, each.window)
            for each in known.layers
            if each.is_cached
        )
        self._mixtures = sum(bool(layer.mixture) for layer in decoder.layers)
        if self._mixtures and known.mixture is not None and 0 < known.mixture.used < known.mixture.experts:
            self.experts = known.mixture.experts, known.mixture.used
        recurrent = shape_of(known.layers, known.hidden)
        self.cache_shape = CacheShape(layers, dtype, self.device, recurrent, coded=CODED[kv_dtype])
        self._tapped: NDArray[np.int32] | None = None
        self._parts: WeakKeyDictionary[HostCache, ctypes.Array[CachedPart]] = WeakKeyDictionary()

    def start(self, context_tokens: int) -> None:
        self.context_tokens = min(self.model_tokens, context_tokens)
        self.decoder.fit(self.context_tokens)
        self._engine = Engine(self.threads or os.cpu_count() or 1)
        self._logits = np.empty((0, self.vocabulary), np.float32)
        keep_freed_memory()
        logits = self.forward(self.new_cache(), ForwardBatch.chain(np.arange(min(CHECKED_TOKENS, self.vocabulary))))
        if np.isnan(logits).any():
            raise ModelError(f"The model at {self.path!r} computes NaN; check its weights.")

    def tap_hidden(self, layers: Sequence[int]) -> int:
        """Keeps hidden states in the caches: the inputs of these layers, or the normed output without any.

        Returns their width. Call it before `start`.
        """
        self._tapped = np.array(layers, np.int32)
        width = self.decoder.architecture.hidden * max(1, len(layers))
        self.cache_shape = replace(self.cache_shape, hidden_width=width)
        return width

    @property
    def alone(self) -> str:
        bits = self._engine.call("outrider_alone") if self._engine.threads > 1 else 0
        return ", ".join(f"{1 << i >> 1}-{(1 << i) - 1}" for i in range(1, bits.bit_length()) if bits >> i & 1)

    def new_cache(self) -> HostCache:
        recurrent = self.cache_shape.recurrent
        states = None if recurrent is None else NativeStates(recurrent, self.decoder, self._engine)
        return HostCache(self.cache_shape, self.context_tokens + MARGIN_POSITIONS, states)

    def forward_all(self, segments: Sequence[Segment]) -> list[NDArray[np.float32]]:
        """`ModelRunner.forward_all` with as many segments at once as the library takes."""
        for segment in segments:
            segment.cache.release()
        found: list[NDArray[np.float32]] = []
        for group in grouped(segments, MOST_ROWS, MOST_STREAMS):
            logits = np.split(self._together(group), np.cumsum([each.kept for each in group[:-1]]))
            found += logits if len(group) == len(segments) else [each.copy() for each in logits]
        return found

    def _together(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        """The logits of the segments' rows, one segment after the other, [M, V]; valid until the next call."""
        kept = sum(segment.kept for segment in segments)
        if len(self._logits) < kept:
            # In a mapping, rows that are never used take no memory, and smaller ones leave no holes.
            memory = in_huge_pages(2 * kept * self.vocabulary * self._logits.itemsize)
            self._logits = memory.view(np.float32).reshape(2 * kept, self.vocabulary)
        states, tap = None, Tap(0, None, None)
        if self._tapped is not None:
            width = max(1, len(self._tapped)) * self.hidden
            states = np.empty((sum(segment.rows for segment in segments), width), np.float32)
            tap = Tap(len(self._tapped), self._tapped.ctypes.data, states.ctypes.data)
        described = [_Described(segment, self._parts_of(segment.cache)) for segment in segments]
        touched = self._engine.call(
            "outrider_forward",
            ctypes.byref(self.decoder.description),
            (Stream * len(segments))(*(each.stream for each in described)),
            len(segments),
            ctypes.c_void_p(self._logits.ctypes.data),
            ctypes.byref(tap),
        )
        self.touched = touched / max(1, self._mixtures)
        for segment in segments:
            if isinstance(segment.cache.recurrent, NativeStates):
                segment.cache.recurrent.written(segment.cache.length, segment.batch)
        if states is not None:
            keep_hidden(states, segments)
        return self._logits[:kept]

    def _parts_of(self, cache: HostCache) -> ctypes.Array[CachedPart]:
        """The addresses of each layer's keys and values in the cache."""
        found = self._parts.get(cache)
        if found is None:
            planes = [plane for layer in cache.layers for plane in layer]
            described = ((each.ctypes.data, *each.strides[:2]) for each in planes)
            found = self._parts[cache] = (CachedPart * len(planes))(*(CachedPart(*each) for each in described))
        return found

    def hold(self, adapter: AdapterWeights) -> NativeAdapter:
        """Packs an adapter, for segments. Raises UnfitAdapter if it does not fit the model."""
        return packed_adapter(adapter, self.decoder, Engine.shared())

    # What a draft head uses of its target.

    @property
    def dtype(self) -> Any:
        """The data type of a head's weights."""
        return sys.modules["torch"].float32

    @property
    def embed_tokens(self) -> torch.nn.Module:
        """The embedding table, without its scale."""
        from outrider.verify.model.cpu.native.layers import NativeEmbedding  # imports torch

        return NativeEmbedding(self.decoder.table)

    @property
    def lm_head(self) -> torch.nn.Module:
        from outrider.verify.model.cpu.native.layers import NativeHead  # imports torch

        return NativeHead(self.decoder.head)


class _Described:
    """A segment as the library takes it, and the arrays that this refers to."""

    def __init__(self, segment: Segment, parts: ctypes.Array[CachedPart]) -> None:
        cache, batch = segment.cache, segment.batch
        length, known = cache.length, batch.known
        token_bytes = known * batch.tokens.itemsize
        self.stream = Stream(
            ctypes.cast(parts, ctypes.POINTER(CachedPart)),
            STORED[cache.stored_dtype],
            segment.rows,
            length + known,
            length,
            segment.kept,
            batch.tokens.ctypes.data + token_bytes,
            batch.depths.ctypes.data + token_bytes,
            None,
            None,
            None,
        )
        if segment.adapter is not None:
            assert isinstance(segment.adapter, NativeAdapter)
            self.stream.adapter = ctypes.pointer(segment.adapter.description)
        if isinstance(cache.recurrent, NativeStates):
            slot, self._parents = cache.recurrent.describe(length, batch)
            self.stream.states = ctypes.pointer(slot)
        if batch.ancestors is not None:
            ancestors = batch.ancestors[batch.known :]
            self._counts = ancestors.sum(1, dtype=np.int32)
            self._slots = (np.nonzero(ancestors)[1] + cache.length).astype(np.int32)
            self.stream.counts, self.stream.slots = self._counts.ctypes.data, self._slots.ctypes.data


def packed_adapter(adapter: AdapterWeights, decoder: Decoder, engine: Engine) -> NativeAdapter:
    """The adapter of a model. Raises UnfitAdapter if its shapes do not fit the model."""
    count = decoder.description.layers
    layers, kept = (structures.AdapterLayer * count)(), list[object]()
    for (layer, name), part in adapter.parts.items():
        shape = (len(part.up), part.down.shape[1])
        expected = decoder.shape_of(layer, name) if layer < count else None
        if shape != expected or part.up.shape[1] != len(part.down):
            model = "no such layer" if expected is None else " x ".join(map(str, expected))
            raise UnfitAdapter(
                f"is for another model: it changes {name} of layer {layer} by {shape[0]} x {shape[1]},"
                f" and the model has {model}"
            )
        weights = packed_pair(replace(part, up=ordered(decoder.architecture, layer, name, part.up)), engine)
        kept.extend(weights)
        setattr(layers[layer], name, structures.LowRank(*(each.matrix for each in weights)))
    rank = max(each.down.shape[0] for each in adapter.parts.values())
    description = structures.Adapter(ctypes.cast(layers, ctypes.POINTER(structures.AdapterLayer)), rank + rank % 2)
    return NativeAdapter(adapter.digest, description, [layers, *kept])


def packed_pair(part: LowRank, engine: Engine) -> tuple[Weights, Weights]:
    """Both factors. An odd rank is padded with zeros, because inputs are even."""
    odd = len(part.down) % 2
    pair = np.pad(part.down, ((0, odd), (0, 0))), np.pad(part.up, ((0, 0), (0, odd)))
    down, up = (Weights.of(engine, Kind.FLOAT32, each) for each in pair)
    return down, up
