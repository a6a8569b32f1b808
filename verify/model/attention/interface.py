"""The attention function that unmodified transformers models call, and what it asks to compute attention.

The rows of a forward are the root (the last committed token) and a draft tree below it, or a chunk of the prompt. Each row
attends to the committed prefix, its ancestors and itself. transformers has no mask function registered under this name, so the
model builds no mask of its own.
"""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from outrider.verify.model.cache.shape import LayerShape
from outrider.verify.model.kwarg_injector import NotPassedOn

NAME = "outrider"


@dataclass(frozen=True)
class Layer:
    index: int
    scaling: float
    window: int | None = None  # sliding window in positions, the row's own included
    softcap: float | None = None  # bound of the scores (Gemma 2)
    sinks: torch.Tensor | None = None  # [heads]; logit of a key without a value (gpt-oss)


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
        raise NotPassedOn("attention")
    if attention_mask is not None:
        raise ValueError("This model computes attention masks of its own, which are not supported.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = Layer(cache_layer(module), scale, sliding_window, softcap, s_aux)
    return attention.attend(layer, query[0], key[0], value[0]).transpose(0, 1).contiguous()[None], None


AttentionInterface.register(NAME, tree_attention)


def cache_layer(module: torch.nn.Module) -> int:
    """The layer of the cache that holds an attention module's keys and values."""
    return cast(int, getattr(module, "cache_layer", module.layer_idx))


class ShapeProbe:
    """Records the shapes and windows of all layers, to size the cache of any model. Implements `Attention`."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}  # of keys and values, by layer
        self._devices: dict[int, torch.device] = {}  # by layer
        self.groups = 1  # query heads per key head, the most of any layer
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
        self.groups = max(self.groups, len(query) // len(key))
        return torch.zeros_like(query[..., :1]).expand(-1, -1, value.shape[2])

    @property
    def _order(self) -> list[int]:
        """The model's layers in the order of the cache, in which those of a device and shape follow each other."""
        indices = sorted(self.shapes)
        homes = list(dict.fromkeys(self._devices[index] for index in indices))
        shapes = list(dict.fromkeys(self._kind(index) for index in indices))
        return sorted(indices, key=lambda index: (homes.index(self._devices[index]), shapes.index(self._kind(index))))

    def _kind(self, index: int) -> tuple[int, int, int]:
        key, value = self.shapes[index]
        return key[0], key[2], value[2]

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shapes of the cache's layers in their order."""
        found = []
        for index in self._order:
            windows = [each for each in self._reach[index] if each is not None]
            window = max(windows) if len(windows) == len(self._reach[index]) else None
            found.append(LayerShape(*self._kind(index), window))
        return tuple(found)

    @property
    def homes(self) -> tuple[torch.device, ...]:
        """The devices of the cache's layers in their order."""
        return tuple(self._devices[index] for index in self._order)

    @property
    def numbers(self) -> dict[int, int]:
        """The cache's layer of each of the model's attention layers. Those that share keys share a layer."""
        numbers = {index: number for number, index in enumerate(self._order)}
        return numbers | {index: numbers[source] for index, source in self._sources.items()}


def number_layers(model: torch.nn.Module, numbers: dict[int, int]) -> None:
    """Tells the model's attention layers which layer of the cache is theirs (`ShapeProbe.numbers`)."""
    for module in model.modules():
        if (index := getattr(module, "layer_idx", None)) in numbers:
            module.cache_layer = numbers[index]  # type: ignore[assignment]
