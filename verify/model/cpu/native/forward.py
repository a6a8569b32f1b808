"""The forward of all streams' rows by the library: steps, and chunks of prompts.

A row's logits have the same bits whatever other rows are computed beside it, so drafts, other streams and the cutting of
prompts change no answer (attention.h and multiply.h say why).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from outrider.verify.model.cpu.native import library
from outrider.verify.model.cpu.native.decoder import Decoder
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.hidden.tap import HiddenTap
from outrider.verify.model.segment import Segment, keep_hidden, kept_rows, positions_of, tokens_of

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
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        tokens, positions, kept = tokens_of(segments), positions_of(segments), kept_rows(segments)
        described = [_Described(segment) for segment in segments]
        streams = (library.Stream * len(segments))(*(each.stream for each in described))
        size = len(kept) * self._decoder.vocabulary
        if self._logits.numel() < size:
            self._logits = torch.empty(size)
        states = torch.empty(len(tokens), 0 if self._tap is None else self._tap.width)
        tapped = None if self._tap is None else states.data_ptr()
        self._engine.call(
            "outrider_forward",
            ctypes.byref(self._decoder.description),
            len(tokens),
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_void_p(positions.data_ptr()),
            streams,
            len(segments),
            ctypes.c_void_p(kept.data_ptr()),
            len(kept),
            ctypes.c_void_p(self._logits.data_ptr()),
            ctypes.byref(library.Tap(len(self._tapped), self._tapped.ctypes.data, tapped)),
        )
        if self._tap is not None:
            keep_hidden(states, segments)
        return self._logits[:size].view(len(kept), -1)


class _Described:
    """A segment as the library takes it, and the arrays that this refers to."""

    def __init__(self, segment: Segment) -> None:
        cache, batch = segment.cache, segment.batch
        tensor = cache.tensor
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:4]]
        self.stream = library.Stream(
            tensor.data_ptr(),
            *strides,
            STORED[tensor.dtype],
            segment.rows,
            cache.length + batch.known,
            cache.length,
            None,
            None,
        )
        if batch.ancestors is not None:
            ancestors = batch.ancestors[batch.known :].numpy()
            self._counts = ancestors.sum(1, dtype=np.int32)
            self._slots = (np.nonzero(ancestors)[1] + cache.length).astype(np.int32)
            self.stream.counts, self.stream.slots = self._counts.ctypes.data, self._slots.ctypes.data
