"""Tree attention: the attention function that unmodified transformers models call, over our own KV cache.

The rows of a forward are the root (the last committed token) and a draft tree below it, or a chunk of the prompt. Each row
attends to the committed prefix, its ancestors and itself. transformers has no mask function registered under this name, so the
model builds no mask of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.codec import decode
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.shape import LayerShape
from outrider.verify.model.delivery import NotHandedOn
from outrider.verify.model.dot_product import dot_product_attention

NAME = "outrider"
ABSORBED_ROWS = MAX_NODES + 1  # of a step; with more, it is faster to expand all latents


class Latent(Protocol):
    """The weights that expand a layer's latents, [1, L, rank + rotary], to keys and values of its heads."""

    value_dim: int

    def expand(self, query: torch.Tensor, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The query, keys and values of all heads."""

    def absorb(self, query: torch.Tensor, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A query, keys and values, all of latents; `values` is due to the output."""

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Weighted latents, [heads, N, rank], to weighted values, [heads, N, value_dim]."""


@dataclass(frozen=True)
class Layer:
    """Attention parameters of one layer."""

    index: int
    scaling: float
    window: int | None = None  # sliding window in positions, the row's own included
    softcap: float | None = None  # bound of the scores (Gemma 2)
    sinks: torch.Tensor | None = None  # [heads]; logit of a key without a value (gpt-oss)
    latent: Latent | None = None  # if the keys are latents, which hold the values, too


class Attention(Protocol):
    """The attention of one forward, called by every layer."""

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Query [heads, N, head_dim], keys and values [kv_heads, N, head_dim] of the new rows to [heads, N, head_dim]."""


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
    """The attention function registered with transformers; returns [1, N, heads, head_dim]. Raises ValueError."""
    if attention is None:
        raise NotHandedOn("attention")
    if attention_mask is not None:
        raise ValueError("This model computes attention masks of its own, which are not supported.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = Layer(cache_layer(module), scale, sliding_window, softcap, s_aux, getattr(module, "latent", None))
    return attention.attend(layer, query[0], key[0], value[0]).transpose(0, 1).contiguous()[None], None


AttentionInterface.register(NAME, tree_attention)


def cache_layer(module: torch.nn.Module) -> int:
    """The layer of the cache that holds an attention module's keys and values."""
    return cast(int, getattr(module, "cache_layer", module.layer_idx))


def number_layers(model: torch.nn.Module, numbers: dict[int, int]) -> None:
    """Tells the model's attention layers which layer of the cache is theirs (`ShapeProbe.numbers`)."""
    for module in model.modules():
        if numbers.get(index := getattr(module, "layer_idx", None), index) != index:  # type: ignore[arg-type]
            module.cache_layer = numbers[index]  # type: ignore[assignment, index]


class TorchAttention:
    """Attention of one forward over a cache in plain torch. Implements `Attention`; the reference for the faster ones."""

    def __init__(self, cache: KVCache, batch: ForwardBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._masks: dict[tuple[int | None, torch.device], torch.Tensor | None] = {}  # by window

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.write(layer.index, key, value, self._batch.known)
        unread = self._cache.visible - self.reach(layer.window)
        keys, values = keys[:, unread:], values[:, unread:]
        in_blocks = can_flash(layer, keys, key, value)
        if not in_blocks:
            keys, values = decode(keys, key.shape[2], key.dtype), decode(values, value.shape[2], value.dtype)
        is_absorbed = layer.latent is not None and query.shape[1] <= ABSORBED_ROWS
        if layer.latent is not None:
            query, keys, values = (layer.latent.absorb if is_absorbed else layer.latent.expand)(query, keys)
        heads, rows, head_dim = query.shape
        groups = heads // len(keys)
        # Query heads that share a key head are stacked as rows of it, so no key or value is copied.
        packed = query.reshape(len(keys), groups * rows, head_dim)
        mask = self.mask(layer.window, groups, query)
        if in_blocks:
            out = flash(packed, keys, values, mask, layer.scaling)[0].to(query.dtype)
        elif layer.softcap is None and layer.sinks is None:
            out = dot_product_attention(packed, keys, values, mask, layer.scaling)
        else:
            out = _capped(layer, packed, keys, values, mask)
        out = out.reshape(heads, rows, value.shape[2] if layer.latent is None else values.shape[2])
        return layer.latent.values(out) if is_absorbed and layer.latent is not None else out

    def reach(self, window: int | None) -> int:
        """The number of committed rows that a layer with this window reads, the last ones."""
        return self._cache.visible if window is None else min(self._cache.visible, window - 1)

    def mask(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """Additive mask [groups * (N - known), reach + N] with dtype and device of `like`; None if nothing is masked."""
        if (window, like.device) not in self._masks:
            self._masks[window, like.device] = self._build(window, groups, like)
        return self._masks[window, like.device]

    def _build(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        length, rows = self.reach(window), len(self._batch)
        if rows == 1 or (window is None and self._batch.is_chain_end):
            return None
        ancestors = self._batch.ancestor_mask().to(like.device)
        allowed = torch.ones(rows, length + rows, dtype=torch.bool, device=like.device)
        allowed[:, length:] = ancestors
        if window is not None:
            position = length + ancestors.sum(1) - 1
            first = position - window + 1  # of the row's window
            prefix = torch.arange(length, device=like.device)
            allowed[:, :length] &= prefix >= first[:, None]
            allowed[:, length:] &= position >= first[:, None]
        allowed = allowed[self._batch.known :]
        mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(~allowed, -torch.inf)
        return mask.repeat(groups, 1)


def can_flash(layer: Layer, keys: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `flash` computes attention to these rows of a cache: those in 8 bits, which it decodes block by block."""
    is_plain = layer.latent is None and layer.softcap is None and layer.sinks is None
    return is_plain and keys.element_size() == 1 and keys.device.type == "cpu" and key.shape == value.shape


def flash(
    query: torch.Tensor,  # [kv_heads, M, D]
    keys: torch.Tensor,  # [kv_heads, L, stored width], L > 0, as `KVCache.write` returns them
    values: torch.Tensor,
    mask: torch.Tensor | None,  # [M, L], additive
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention on a CPU: the output, [kv_heads, M, D], and the scores' log-sum-exp, float32 [kv_heads, M]. Scriptable.

    Rows in 8 bits are decoded in blocks that fit the CPU's caches. Rows that attend to nothing have an output of zeros.
    """
    block = 2048 if keys.element_size() == 1 else keys.size(1)
    out, total = query, torch.empty(0)
    for start in range(0, keys.size(1), block):
        end = min(start + block, keys.size(1))
        part_keys = decode(keys[:, start:end], query.size(2), query.dtype)
        part_values = decode(values[:, start:end], query.size(2), query.dtype)
        part_mask: torch.Tensor | None = None
        if mask is not None:
            part_mask = mask[:, start:end]
        found, largest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], part_keys[None], part_values[None], 0.0, False, attn_mask=part_mask, scale=scaling
        )
        part, part_total = found[0], largest[0]
        if part_mask is not None:
            part, part_total = part.nan_to_num(), part_total.masked_fill(part_mask.amax(-1) == -torch.inf, -torch.inf)
        if start == 0:
            out, total = part, part_total
        else:
            both = torch.logaddexp(total, part_total)
            weight, part_weight = (total - both).exp().nan_to_num(), (part_total - both).exp().nan_to_num()
            out = out.to(torch.float32) * weight.unsqueeze(-1) + part.to(torch.float32) * part_weight.unsqueeze(-1)
            total = both
    return out, total


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


class ShapeProbe:
    """Records the shapes and windows of all layers, to size the cache of any model. Implements `Attention`."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}  # of keys and values, by layer
        self.windows: list[int | None] = []  # distinct
        self._devices: dict[int, torch.device] = {}  # by layer
        self.groups = 1  # query heads per key head
        self._keys: dict[int, torch.Tensor] = {}  # by layer
        self._sources: dict[int, int] = {}  # layers that have the keys of an earlier layer, and that layer
        self._reach: dict[int, list[int | None]] = {}  # windows of those who read a layer's keys, by layer

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if key.device != query.device:
            raise ValueError(f"layers on {query.device} read keys of {key.device}; set model.device to one device")
        source = next((index for index, each in self._keys.items() if each.data_ptr() == key.data_ptr()), None)
        if source is None:
            self._keys[layer.index] = key
            self.shapes[layer.index], self._devices[layer.index] = (key.shape, value.shape), key.device
        else:
            self._sources[layer.index] = source
        self._reach.setdefault(layer.index if source is None else source, []).append(layer.window)
        if layer.window not in self.windows:
            self.windows.append(layer.window)
        self.groups = len(query) // len(key)
        return torch.zeros_like(query[..., :1]).expand(
            -1, -1, value.shape[2] if layer.latent is None else layer.latent.value_dim
        )

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shapes of the cache's layers in their order."""
        found = []
        for index, (key, value) in sorted(self.shapes.items()):
            windows = [each for each in self._reach[index] if each is not None]
            window = max(windows) if len(windows) == len(self._reach[index]) else None
            found.append(LayerShape(key[0], key[2], value[2], window))
        return tuple(found)

    @property
    def homes(self) -> tuple[torch.device, ...]:
        """The devices of the cache's layers in their order, if there are several."""
        homes = tuple(self._devices[index] for index in sorted(self.shapes))
        return homes if len(set(homes)) > 1 else ()

    @property
    def numbers(self) -> dict[int, int]:
        """The cache's layer of each of the model's attention layers. Those that share keys share a layer."""
        numbers = {index: number for number, index in enumerate(sorted(self.shapes))}
        return numbers | {index: numbers[source] for index, source in self._sources.items()}
