"""The KV cache of one session slot: one preallocated tensor, written in place, committed by moving accepted rows.

Promises that rows beyond `length` never matter. Knows nothing about tokens or attention.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from verify.model.transfer import to_device

MEMORY_SHARE = 0.8  # of what is free at the start


@dataclass(frozen=True)
class CacheShape:
    """What a model needs per position."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes_for(self, positions: int) -> int:
        """Size of a slot of `positions`, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * positions * self.dtype.itemsize


@dataclass(frozen=True)
class SwappedRows:
    """The committed rows of a slot, in host memory."""

    rows: torch.Tensor  # [layers, 2, kv_heads, length, head_dim]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


def slots_that_fit(shape: CacheShape, positions: int, beside: int = 0) -> int:
    """How many slots of `positions`, with `beside` bytes each, fit into the device's free memory; forwards need some of it."""
    if shape.device.type == "cuda":
        free = torch.cuda.mem_get_info(shape.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(MEMORY_SHARE * free) // (shape.bytes_for(positions) + beside)


class KVCache:
    """Keys and values of up to `positions` tokens; the first `length` are committed."""

    def __init__(self, shape: CacheShape, positions: int) -> None:
        # Pages of an untouched tensor cost nothing on a CPU, so a slot is as large as its text, not as its bound.
        self.tensor = torch.empty(
            (shape.layers, 2, shape.kv_heads, positions, shape.head_dim), dtype=shape.dtype, device=shape.device
        )
        self.positions = positions
        self.length = 0

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, known: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [kv_heads, N, head_dim] `known` rows after `length`; returns all so far, [kv_heads, length+..., head_dim]."""
        start = self.length + known
        stop = start + key.shape[1]
        keys, values = self.tensor[layer, 0], self.tensor[layer, 1]
        keys[:, start:stop] = key
        values[:, start:stop] = value
        return keys[:, :stop], values[:, :stop]

    def commit(self, rows: list[int]) -> None:
        """Keeps the rows at `length + r` for r in `rows` (ascending); moves only those that are not yet in place."""
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place:
            in_place += 1
        if in_place < len(rows):
            start = self.length + in_place
            index = to_device(torch.tensor(rows[in_place:]) + self.length, self.tensor.device)
            self.tensor[:, :, :, start : self.length + len(rows)] = self.tensor[:, :, :, index]
        self.length += len(rows)

    def swap_out(self) -> SwappedRows:
        """A copy of the committed rows for later; the slot is empty then."""
        rows = self.tensor[:, :, :, : self.length].to("cpu", copy=True)
        self.length = 0
        return SwappedRows(rows)

    def swap_in(self, swapped: SwappedRows) -> None:
        """Takes parked rows back, in place of what it holds."""
        self.length = swapped.rows.shape[3]
        self.tensor[:, :, :, : self.length] = swapped.rows.to(self.tensor.device)

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` positions."""
        self.length = min(self.length, length)
