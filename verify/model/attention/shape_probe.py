"""An attention that computes nothing: it records what a model's layers ask of it, to size the cache of any model."""

from __future__ import annotations

import torch

from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.cache.shape import LayerShape


class ShapeProbe:
    """Records the shapes and windows of all layers, to size the cache of any model. Implements `Attention`."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}  # of keys and values, by layer
        self.windows: list[int | None] = []  # distinct
        self._devices: dict[int, torch.device] = {}  # by layer
        self.group_sizes: set[int] = set()  # query heads per key head, of all layers
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
        self.group_sizes.add(len(query) // len(key))
        return torch.zeros_like(query[..., :1]).expand(-1, -1, value.shape[2])

    @property
    def groups(self) -> int:
        """Query heads per key head, the most of any layer."""
        return max(self.group_sizes, default=1)

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


def number_layers(model: torch.nn.Module, numbers: dict[int, int]) -> None:
    """Tells the model's attention layers which layer of the cache is theirs (`ShapeProbe.numbers`)."""
    for module in model.modules():
        if numbers.get(index := getattr(module, "layer_idx", None), index) != index:  # type: ignore[arg-type]
            module.cache_layer = numbers[index]  # type: ignore[assignment, index]
