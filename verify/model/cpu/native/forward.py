"""The forward of all streams' rows by the library: steps, and chunks of prompts.

A row's logits have the same bits whatever other rows are computed beside it, so drafts, other streams and the cutting of
prompts change no answer (attention.h and multiply.h say why).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from outrider.verify.model.adapter import AdapterWeights
from outrider.verify.model.cpu.native import library
from outrider.verify.model.cpu.native.adapter import NativeAdapter, packed_adapter
from outrider.verify.model.cpu.native.decoder import Decoder
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.hidden.tap import HiddenTap
from outrider.verify.model.segment import Segment, keep_hidden

# The library's numbers of the data types of keys and values.
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3, torch.float8_e4m3fn: 4}


class NativeForward:
    """Runs a decoder. Implements `outrider.verify.model.segment.ForwardBackend`."""

    max_streams = 64
    max_rows = 4096
    reads_prompts = is_invariant = True

    def __init__(self, decoder: Decoder, engine: Engine, tap: HiddenTap | None = None) -> None:
        """With `tap`, hidden states are kept in the caches."""
        self._decoder, self._engine, self._tap = decoder, engine, tap
        self._tapped = np.array(() if tap is None else tap.layers, np.int32)
        self._logits = torch.empty(0, decoder.vocabulary)

    def hold(self, adapter: AdapterWeights) -> NativeAdapter:
        """Packs an adapter, for segments. Raises UnfitAdapter if it does not fit the model."""
        return packed_adapter(adapter, self._decoder, self._engine)

    @torch.inference_mode()
    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        kept = sum(segment.kept for segment in segments)
        if len(self._logits) < kept:
            self._logits = torch.empty(kept, self._decoder.vocabulary)
        states, tap = None, library.Tap(0, None, None)
        if self._tap is not None:
            states = torch.empty(sum(segment.rows for segment in segments), self._tap.width)
            tap = library.Tap(len(self._tapped), self._tapped.ctypes.data, states.data_ptr())
        described = [_Described(segment) for segment in segments]
        self._engine.call(
            "outrider_forward",
            ctypes.byref(self._decoder.description),
            (library.Stream * len(segments))(*(each.stream for each in described)),
            len(segments),
            ctypes.c_void_p(self._logits.data_ptr()),
            ctypes.byref(tap),
        )
        if states is not None:
            keep_hidden(states, segments)
        return self._logits[:kept]


class _Described:
    """A segment as the library takes it, and the arrays that this refers to."""

    def __init__(self, segment: Segment) -> None:
        cache, batch = segment.cache, segment.batch
        tensor, length, known = cache.tensor, cache.length, batch.known
        size, token_bytes = tensor.element_size(), known * batch.tokens.itemsize
        self.stream = library.Stream(
            tensor.data_ptr(),
            *(stride * size for stride in tensor.stride()[:4]),
            STORED[tensor.dtype],
            segment.rows,
            length + known,
            length,
            segment.kept,
            batch.padding,
            batch.tokens.ctypes.data + token_bytes,
            batch.depths.ctypes.data + token_bytes,
            None,
            None,
            None,
        )
        if segment.adapter is not None:
            assert isinstance(segment.adapter, NativeAdapter)
            self.stream.adapter = ctypes.pointer(segment.adapter.description)
        if batch.ancestors is not None:
            ancestors = batch.ancestors[batch.known :]
            self._counts = ancestors.sum(1, dtype=np.int32)
            self._slots = (np.nonzero(ancestors)[1] + cache.length).astype(np.int32)
            self.stream.counts, self.stream.slots = self._counts.ctypes.data, self._slots.ctypes.data
