"""The layout of a model's caches: heads and widths of each layer, bytes of a position and of a slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from outrider.verify.model.memory import Device, can_discard

if TYPE_CHECKING:
    from outrider.verify.model.recurrent.states import RecurrentShape

# Data type of keys and values; auto = the model's.
KVDtype = Literal["auto", "int8", "fp8"]
SCALE_BYTES = 4

# The number of a text's positions whose hidden states are kept. Heads are trained on contexts of about this length.
HIDDEN_POSITIONS = 2048


class LayerShape(NamedTuple):
    heads: int  # key heads
    key_dim: int
    value_dim: int
    window: int | None = None  # largest sliding window of those who read the layer; None = a row may read all before


@dataclass(frozen=True)
class CacheShape:
    """Layout of a model's slots."""

    layers: tuple[LayerShape, ...]  # layers with attention
    dtype: Any  # the model's data type, torch's or a HostType
    device: Device
    recurrent: RecurrentShape | None = None  # shape of the recurrent layers' states
    hidden_width: int = 0  # width of the hidden states that a draft head reads; 0 = none are kept
    hidden_positions: int = HIDDEN_POSITIONS
    homes: tuple[Any, ...] = ()  # devices of the layers, if there are others; consecutive layers share one
    coded: Any | None = None  # data type of keys and values in 8 bits (`outrider.verify.model.cache.codec`)

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, dtype: Any, device: Device) -> CacheShape:
        """The layout of a model whose layers are alike."""
        return cls((LayerShape(kv_heads, head_dim, head_dim),) * layers, dtype, device)

    def over(self, devices: Sequence[Any]) -> CacheShape:
        """The layout if each device has a part of the heads of all layers: its layers come one after the other."""
        part = tuple(each._replace(heads=each.heads // len(devices)) for each in self.layers)
        homes = tuple(device for device in devices for _ in part)
        return replace(self, layers=part * len(devices), homes=homes)

    @property
    def is_uniform(self) -> bool:
        """Whether keys and values have one shape in all layers."""
        sizes = {(each.heads, each.key_dim, each.value_dim) for each in self.layers}
        return len(sizes) == 1 and self.layers[0].key_dim == self.layers[0].value_dim

    @property
    def window(self) -> int | None:
        """The largest sliding window of the layers; None if no layer has one."""
        return max((each.window for each in self.layers if each.window is not None), default=None)

    @property
    def releases(self) -> bool:
        """Whether slots return the memory of rows that no window reads any more."""
        return self.window is not None and can_discard(self.device)

    @property
    def kv_heads(self) -> int:
        """Key heads of a uniform layout."""
        assert self.is_uniform
        return self.layers[0].heads

    @property
    def head_dim(self) -> int:
        """Width of keys and values of a uniform layout."""
        assert self.is_uniform
        return self.layers[0].key_dim

    @property
    def stored_dtype(self) -> Any:
        """The data type of keys and values in the cache."""
        return self.coded or self.dtype

    def stored_width(self, width: int) -> int:
        """Elements of `stored_dtype` that `width` values of a row take."""
        return stored_width(width) if self.coded else width

    @property
    def planes(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """The keys (0) and values (1) of layers by heads and width: equal ones are in one tensor."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for layer, each in enumerate(self.layers):
            for part, width in enumerate((each.key_dim, each.value_dim)):
                found.setdefault((each.heads, width), []).append((layer, part))
        return found

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that do not depend on its positions."""
        states = 0 if self.recurrent is None else self.recurrent.slot_bytes
        return states + self.hidden_positions * self.hidden_width * int(self.dtype.itemsize)

    def bytes_for(self, positions: int) -> int:
        """Bytes of the keys and values of `positions`."""
        return self._bytes(self.layers) * positions

    def windowed_bytes_for(self, positions: int) -> int:
        """Bytes of the keys and values of `positions` in layers with a window."""
        return self._bytes(each for each in self.layers if each.window is not None) * positions

    def _bytes(self, layers: Iterable[LayerShape]) -> int:
        rows = (each.heads * (self.stored_width(each.key_dim) + self.stored_width(each.value_dim)) for each in layers)
        return sum(rows) * int(self.stored_dtype.itemsize)

    @property
    def parts(self) -> list[CacheShape]:
        """The layout on each device: its layers, and on the first what does not belong to layers."""
        homes = self.homes or (self.device,) * len(self.layers)
        states = {} if self.recurrent is None else {part.device: part for part in self.recurrent.parts}
        found = []
        for device in dict.fromkeys((self.device, *homes, *states)):
            layers = tuple(each for each, home in zip(self.layers, homes, strict=True) if home == device)
            part = replace(self, layers=layers, device=device, recurrent=states.get(device), homes=())
            found.append(part if device == self.device else replace(part, hidden_width=0))
        return found


def stored_width(width: int) -> int:
    """Bytes of a row of `width` values in 8 bits (`outrider.verify.model.cache.codec`); scales are aligned to their size."""
    return (width + 3) // 4 * 4 + SCALE_BYTES if width else 0
