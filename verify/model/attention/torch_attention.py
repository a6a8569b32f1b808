"""Attention of a forward in plain torch, for any layer, mask and kind of cache: the reference for the faster ones."""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.verify.model.attention.interface import Attention, Layer
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.codec import decode
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.pictures import BothWays
from outrider.verify.model.transfer import to_device


class TorchAttention:
    """Attention of one forward over a cache in plain torch. Implements `Attention`; the reference for the faster ones."""

    def __init__(self, cache: TensorCache, batch: ForwardBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._masks: dict[tuple[int | None, torch.device], torch.Tensor | None] = {}  # by window

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.write(layer.index, key, value, self._batch.known)
        unread = self._cache.length - self.reach(layer.window)
        keys, values = keys[:, unread:], values[:, unread:]
        keys, values = decode(keys, key.shape[2], key.dtype), decode(values, value.shape[2], value.dtype)
        return attend(layer, query, keys, values, self.mask(layer.window, len(query) // len(keys), query))

    def reach(self, window: int | None) -> int:
        """The number of committed rows that a layer with this window reads, the last ones."""
        return self._cache.length if window is None else min(self._cache.length, window - 1)

    def mask(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """Additive mask [groups * (N - known), reach + N] with dtype and device of `like`; None if nothing is masked."""
        if (window, like.device) not in self._masks:
            self._masks[window, like.device] = self._build(window, groups, like)
        return self._masks[window, like.device]

    def visible(self, window: int | None) -> torch.Tensor:
        """A mask of the rows to which each row attends in layers with this window, bool [N, N]."""
        return torch.from_numpy(self._batch.ancestor_mask())

    def _build(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        length, rows = self.reach(window), len(self._batch)
        if rows == 1 or (window is None and self._batch.is_chain_end):
            return None
        visible = to_device(self.visible(window), like.device)
        allowed = torch.ones(rows, length + rows, dtype=torch.bool, device=like.device)
        allowed[:, length:] = visible
        if window is not None:
            position = length + to_device(torch.from_numpy(self._batch.depths), like.device)
            first = position - window + 1  # of the row's window
            prefix = torch.arange(length, device=like.device)
            allowed[:, :length] &= prefix >= first[:, None]
            allowed[:, length:] &= position >= first[:, None]
        allowed = allowed[self._batch.known :]
        mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(~allowed, -torch.inf)
        return mask.repeat(groups, 1)


def attend(
    layer: Layer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of query [heads, N, head_dim] to keys and values [kv_heads, L, head_dim]; `mask` as in `TorchAttention`."""
    heads, rows, head_dim = query.shape
    # Query heads that share a key head are stacked as rows of it, so no key or value is copied.
    packed = query.reshape(len(keys), heads // len(keys) * rows, head_dim)
    if layer.softcap is None and layer.sinks is None:
        out = scaled_dot_product_attention(packed[None], keys[None], values[None], attn_mask=mask, scale=layer.scaling)[0]
    else:
        out = _capped(layer, packed, keys, values, mask)
    return out.reshape(heads, rows, values.shape[2])


class PictureAttention(TorchAttention):
    """Attention of a picture's rows: in some models and layers, those of pixels attend to each other in both directions."""

    def __init__(self, segment: Segment, both_ways: BothWays) -> None:
        super().__init__(segment.cache, segment.batch)
        assert segment.picture is not None
        self._is_pixels, self._both_ways = segment.picture.is_pixels, both_ways

    def visible(self, window: int | None) -> torch.Tensor:
        causal = super().visible(window)
        if self._both_ways == "none" or (self._both_ways == "windows" and window is None):
            return causal
        return causal | (self._is_pixels[:, None] & self._is_pixels)


class JointAttention:
    """Attention of a forward over several streams, by the attention of each. Implements `Attention`."""

    def __init__(self, streams: Sequence[tuple[Attention, int]]) -> None:
        """The streams' attention and numbers of rows, in the rows' order."""
        self._streams = streams

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        counts = [rows for _, rows in self._streams]
        parts = zip(*(each.split(counts, 1) for each in (query, key, value)), strict=True)
        return torch.cat([each.attend(layer, *part) for (each, _), part in zip(self._streams, parts, strict=True)], 1)


def _capped(
    layer: Layer,
    query: torch.Tensor,  # [kv_heads, groups * N, head_dim]
    keys: torch.Tensor,  # [kv_heads, L, head_dim]
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with soft-capped scores or sinks, which scaled_dot_product_attention does not support."""
    scores = (query @ keys.transpose(1, 2)).float() * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores + mask
    if layer.sinks is not None:
        groups = len(layer.sinks) // len(keys)
        sinks = layer.sinks.float().view(len(keys), groups, 1).expand(-1, -1, query.shape[1] // groups)
        scores = torch.cat([scores, sinks.reshape(len(keys), -1, 1)], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return weights.to(values.dtype) @ values
