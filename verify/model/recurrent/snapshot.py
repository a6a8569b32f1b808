"""States of layers on several devices as one tensor, and their snapshots, which cross to the host or back in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.verify.model.recurrent.states import Snapshot
from outrider.verify.model.transfer import to_device, to_host


class SplitTensor:
    """A tensor [layers, ...] with consecutive layers on each device. Does what `RecurrentStates` does with a tensor."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = list(parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (layer for part in self.parts for layer in part)

    def clone(self) -> SplitTensor:
        return SplitTensor([part.clone() for part in self.parts])

    def _places(self, index: Any) -> list[tuple[torch.Tensor, Any]]:
        """The parts that have layers of an index, and the index in each; tensors of indices may be on the host."""
        layer, *others = index if isinstance(index, tuple) else (index,)
        parts = self.parts
        if isinstance(layer, int):
            number = next(number for number, part in enumerate(parts) if layer < sum(map(len, parts[: number + 1])))
            parts, layer = [parts[number]], layer - sum(map(len, parts[:number]))
        return [
            (part, (layer, *(to_device(each, part.device) if isinstance(each, torch.Tensor) else each for each in others)))
            for part in parts
        ]

    def __getitem__(self, index: Any) -> Any:
        """The tensor of a layer, or all layers' as a `SplitTensor`."""
        found = [part[place] for part, place in self._places(index)]
        return (
            found[0]
            if isinstance(index, int) or (isinstance(index, tuple) and isinstance(index[0], int))
            else SplitTensor(found)
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        places = self._places(index)
        values = value.parts if isinstance(value, SplitTensor) else [value] * len(places)
        for (part, place), own in zip(places, values, strict=True):
            part[place] = own


@dataclass(frozen=True, eq=False)
class DeviceSnapshot(Snapshot):
    """A snapshot in tensors, which are split if its layers are on several devices."""

    buffers: Sequence[torch.Tensor]  # uint8 [N], of each device: matrices, then windows, which may have smaller elements

    @classmethod
    def of(cls, length: int, matrices: Any, windows: Any, like: tuple[Any, Any]) -> DeviceSnapshot:
        """A copy of arrays or tensors, wherever they are, on the devices of the tensors `like` them."""
        pairs = list(zip(*map(parts_of, (matrices, windows), like), strict=True))
        buffers = [to_device(joined(pair), own.device) for pair, own in zip(pairs, parts_of(like[0], like[0]), strict=True)]
        found = zip(*map(parted, buffers, pairs), strict=True)
        own_matrices, own_windows = (SplitTensor(each) if isinstance(like[0], SplitTensor) else each[0] for each in found)
        return cls(length, own_matrices, own_windows, buffers)

    def on_host(self, pinned: bool = False) -> Snapshot:
        pairs = zip(*(parts_of(each, each) for each in (self.matrices, self.windows)), strict=True)
        copies = (to_host(buffer, pinned) for buffer in self.buffers)
        parts = zip(*map(parted, copies, pairs), strict=True)
        return Snapshot(self.length, *(each[0] if len(each) == 1 else torch.cat(each) for each in parts))


def parts_of(values: Any, like: Any) -> Sequence[torch.Tensor]:
    """The layers on each device of `like`."""
    if isinstance(values, SplitTensor):
        return values.parts
    whole = torch.as_tensor(values)
    return whole.split([len(part) for part in like.parts]) if isinstance(like, SplitTensor) else [whole]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors, uint8 [N]."""
    return torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors])


def parted(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of which a buffer has the bytes."""
    parts = buffer.split([each.nbytes for each in like])
    return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, like, strict=True)]
