"""The model runner whose forwards the compiled library computes, from packed weights alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.model.adapter import AdapterWeights
from outrider.verify.model.batch import ForwardBatch, Segment, grouped
from outrider.verify.model.cache.host_cache import HostCache
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS
from outrider.verify.model.cache.shape import CacheShape, KVDtype, LayerShape
from outrider.verify.model.cpu.native.adapter import NativeAdapter, packed_adapter
from outrider.verify.model.cpu.native.decoder import Decoder
from outrider.verify.model.cpu.native.forward import NativeForward
from outrider.verify.model.cpu.native.library import Engine, variant
from outrider.verify.model.cpu.native.states import NativeStates, shape_of
from outrider.verify.model.memory import FLOAT8, HOST, INT8, HostType, keep_freed_memory
from outrider.verify.model.runner import ModelRunner

if TYPE_CHECKING:
    import torch

CODED: dict[KVDtype, HostType | None] = {"auto": None, "int8": INT8, "fp8": FLOAT8}
# The tokens that are read at a start, to see that the weights compute numbers.
CHECKED_TOKENS = 4


class NativeRunner(ModelRunner):
    """A packed decoder. A row's logits have the same bits beside any others, by construction."""

    device = HOST
    invariance = "on, by construction"
    is_invariant = is_steady = True
    max_rows = NativeForward.max_rows

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
        self.decoder, self._path = decoder, path
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
        self._tapped: tuple[int, ...] | None = None
        self._forward: NativeForward | None = None

    def start(self, context_tokens: int) -> None:
        self.context_tokens = min(self.model_tokens, context_tokens)
        self.decoder.fit(self.context_tokens)
        self._engine = Engine(self.threads or os.cpu_count() or 1)
        self._forward = NativeForward(self.decoder, self._engine, self._tapped)
        keep_freed_memory()
        logits = self.forward(self.new_cache(), ForwardBatch.chain(np.arange(min(CHECKED_TOKENS, self.vocabulary))))
        if np.isnan(logits).any():
            raise ModelError(f"The model at {self._path!r} computes NaN; check its weights.")

    def tap_hidden(self, layers: Sequence[int]) -> int:
        """Keeps hidden states in the caches: the inputs of these layers, or the normed output without any.

        Returns their width. Call it before `start`.
        """
        self._tapped = tuple(layers)
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
        assert self._forward is not None
        for segment in segments:
            segment.cache.release()
        found: list[NDArray[np.float32]] = []
        for group in grouped(segments, NativeForward.max_rows, NativeForward.max_streams):
            logits = np.split(self._forward(group), np.cumsum([each.kept for each in group[:-1]]))
            self.touched = self._forward.touched / max(1, self._mixtures)
            found += logits if len(group) == len(segments) else [each.copy() for each in logits]
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
        """The layer that computes logits."""
        from outrider.verify.model.cpu.native.layers import NativeHead  # imports torch

        return NativeHead(self.decoder.head)
