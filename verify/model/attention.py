"""Tree attention: the attention function that unmodified transformers models call, over our own KV cache.

The rows of a forward are the last committed token and a draft tree below it (or a chunk of prompt). Each row sees the
whole committed prefix, itself and its ancestors. Registered with transformers under a name that has no mask function, so
the model builds no mask of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from verify.model.cache import KVCache

NAME = "outrider"


@dataclass(frozen=True)
class Layer:
    """What one layer asks of its attention."""

    index: int
    scaling: float
    window: int | None = None  # positions that a row sees, itself included
    softcap: float | None = None  # Gemma 2
    sinks: torch.Tensor | None = None  # [heads]; gpt-oss


class Attention(Protocol):
    """What a forward hands to every layer."""

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Takes the new rows, [heads, N, head_dim] and [kv_heads, N, head_dim], and returns [heads, N, head_dim]."""


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, N, head_dim]
    key: torch.Tensor,  # [1, kv_heads, N, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention: Attention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; returns [1, N, heads, head_dim]."""
    if attention is None:
        raise ValueError("This model does not hand keyword arguments on to its attention, so it cannot be served.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = Layer(cast(int, module.layer_idx), scale, sliding_window, softcap, s_aux)
    return attention.attend(layer, query[0], key[0], value[0]).transpose(0, 1)[None], None


AttentionInterface.register(NAME, tree_attention)


class TorchAttention:
    """One forward over a cache, in plain torch. Implements `Attention`; the reference for every faster one.

    `ancestors` is bool [N, N], or None for rows that follow one another (a chunk of prompt, or a single row). The first
    `known` of the N rows were written by earlier forwards; this one is over the others.
    """

    def __init__(self, cache: KVCache, rows: int, ancestors: torch.Tensor | None, known: int = 0) -> None:
        self._cache = cache
        self._rows = rows
        self._ancestors = ancestors
        self._known = known
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.write(layer.index, key, value, self._known)
        heads, rows, head_dim = query.shape
        groups = heads // len(key)
        # The query heads that share a key head become more rows of it: no key or value is ever repeated.
        packed = query.reshape(len(key), groups * rows, head_dim)
        mask = self.mask(layer.window, groups, query)
        if layer.softcap is None and layer.sinks is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                packed[None], keys[None], values[None], attn_mask=mask, scale=layer.scaling
            )
        else:
            out = _capped(layer, packed, keys, values, mask)
        return out.reshape(heads, rows, head_dim)

    def mask(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """Additive mask [groups * (N - known), length + N] in the dtype of `like`; None where every row sees everything."""
        if window not in self._masks:
            self._masks[window] = self._build(window, groups, like)
        return self._masks[window]

    def _build(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        start, rows = self._cache.length, self._rows
        if rows == 1 and (window is None or start < window):
            return None
        seen = self._ancestors
        if seen is None:
            seen = torch.ones(rows, rows, dtype=torch.bool, device=like.device).tril()
        allowed = torch.ones(rows, start + rows, dtype=torch.bool, device=like.device)
        allowed[:, start:] = seen
        if window is not None:
            depth = seen.sum(1)  # a row's position is start + depth - 1
            first = start + depth - window
            prefix = torch.arange(start, device=like.device)
            allowed[:, :start] &= prefix >= first[:, None]
            allowed[:, start:] &= (depth - 1) + start >= first[:, None]
        allowed = allowed[self._known :]
        mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(~allowed, -torch.inf)
        return mask.repeat(groups, 1)


def _capped(
    layer: Layer,
    query: torch.Tensor,  # [kv_heads, groups * N, head_dim]
    keys: torch.Tensor,  # [kv_heads, L, head_dim]
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with soft-capped scores or sinks, which scaled_dot_product_attention does not have."""
    scores = (query @ keys.transpose(1, 2)).float() * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores + mask
    if layer.sinks is not None:  # a key without a value
        groups = len(layer.sinks) // len(keys)
        sinks = layer.sinks.float().view(len(keys), groups, 1).expand(-1, -1, query.shape[1] // groups)
        scores = torch.cat([scores, sinks.reshape(len(keys), -1, 1)], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return weights.to(values.dtype) @ values


class ShapeProbe:
    """Notes what the layers hand over, so that a cache can be made for any model. Implements `Attention`."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}  # of keys and values, by layer
        self.windows: list[int | None] = []  # all that there are
        self.groups = 1  # query heads that share a key head

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.shapes[layer.index] = (key.shape, value.shape)
        self.windows += [layer.window] if layer.window not in self.windows else []
        self.groups = len(query) // len(key)
        return torch.zeros_like(query)
