"""The forward of all streams' rows by the library: steps, and chunks of prompts.

A row's logits have the same bits whatever other rows are computed beside it, so drafts, other streams and the cutting of
prompts change no answer (attention.h and multiply.h say why).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.batch import Segment, keep_hidden
from outrider.verify.model.cache.host_cache import HostCache
from outrider.verify.model.cpu.native.adapter import NativeAdapter
from outrider.verify.model.cpu.native.decoder import Decoder
from outrider.verify.model.cpu.native.huge_pages import mapped
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.states import NativeStates
from outrider.verify.model.cpu.native.structures import CachedPart, Stream, Tap
from outrider.verify.model.memory import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8

# The library's numbers of the data types of keys and values.
STORED = {FLOAT32: 0, BFLOAT16: 1, INT8: 2, FLOAT16: 3, FLOAT8: 4}


class NativeForward:
    """Runs a decoder."""

    max_streams = 64
    max_rows = 4096

    def __init__(self, decoder: Decoder, engine: Engine, tapped: Sequence[int] | None = None) -> None:
        """`tapped` keeps hidden states in the caches: the inputs of these layers, or the normed output without any."""
        self._decoder, self._engine = decoder, engine
        self._tapped = None if tapped is None else np.array(tapped, np.int32)
        self.touched = 0  # experts that the latest call used, of all layers
        self._logits = np.empty((0, decoder.head.outputs), np.float32)
        self._parts: WeakKeyDictionary[HostCache, ctypes.Array[CachedPart]] = WeakKeyDictionary()

    def __call__(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        """The logits of the segments' rows, one segment after the other, [M, V]; valid until the next call."""
        kept = sum(segment.kept for segment in segments)
        if len(self._logits) < kept:
            self._logits = self._rows(2 * kept)
        states, tap = None, Tap(0, None, None)
        if self._tapped is not None:
            width = max(1, len(self._tapped)) * self._decoder.architecture.hidden
            states = np.empty((sum(segment.rows for segment in segments), width), np.float32)
            tap = Tap(len(self._tapped), self._tapped.ctypes.data, states.ctypes.data)
        described = [_Described(segment, self._parts_of(segment.cache)) for segment in segments]
        self.touched = self._engine.call(
            "outrider_forward",
            ctypes.byref(self._decoder.description),
            (Stream * len(segments))(*(each.stream for each in described)),
            len(segments),
            ctypes.c_void_p(self._logits.ctypes.data),
            ctypes.byref(tap),
        )
        for segment in segments:
            if isinstance(segment.cache.recurrent, NativeStates):
                segment.cache.recurrent.written(segment.cache.length, segment.batch)
        if states is not None:
            keep_hidden(states, segments)
        return self._logits[:kept]

    def _rows(self, count: int) -> NDArray[np.float32]:
        """Memory for logits, [count, V]. In a mapping, rows that are never used take none, and smaller ones leave no holes."""
        width = self._decoder.head.outputs
        return mapped(count * width * np.dtype(np.float32).itemsize).view(np.float32).reshape(count, width)

    def _parts_of(self, cache: HostCache) -> ctypes.Array[CachedPart]:
        """The addresses of each layer's keys and values in the cache."""
        found = self._parts.get(cache)
        if found is None:
            planes = [plane for layer in cache.layers for plane in layer]
            described = ((each.ctypes.data, *each.strides[:2]) for each in planes)
            found = self._parts[cache] = (CachedPart * len(planes))(*(CachedPart(*each) for each in described))
        return found


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
            0,  # rows whose logits are left out
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
