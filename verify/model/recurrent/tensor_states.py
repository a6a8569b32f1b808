"""The states of recurrent layers as PyTorch computes them, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.verify.model.recurrent.state import advance
from outrider.verify.model.recurrent.states import RecurrentStates, Snapshot
from outrider.verify.model.transfer import lazy_zeros, to_device


class TensorStates(RecurrentStates):
    """The states of one slot. Reads and writes of layers go through `outrider.verify.model.recurrent.rows`."""

    def _zeros(self, size: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return lazy_zeros(size, dtype or torch.float32, self.shape.device)

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def _places(self, rows: Sequence[int], offset: int) -> torch.Tensor:
        return to_device(torch.tensor(rows) + offset, self.matrices.device)

    def _taken(self, snapshot: Snapshot) -> Snapshot:
        parts = (torch.as_tensor(each, device=self.matrices.device) for each in (snapshot.matrices, snapshot.windows))
        return Snapshot(snapshot.length, *parts)

    def _fold(self, rows: int, known: int) -> None:
        window, left = self.shape.window, min(known, self.count - rows)
        for matrices, keys, writes, decays in zip(self.matrices, self.keys, self.writes, self.decays, strict=True):
            advance(matrices, keys[:, :rows], writes[:, :rows], decays[:, :rows])
        if left:
            for tensor in (self.keys, self.writes, self.decays):
                tensor[:, :, :left] = tensor[:, :, rows : rows + left].clone()
        self.inputs[:, : window + left] = self.inputs[:, rows : rows + window + left].clone()
        self.length, self.count = self.length + rows, left
