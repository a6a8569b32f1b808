"""States of layers on several devices as one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from outrider.verify.model.transfer import to_device


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
