"""A tensor as a file stores it. Imports no torch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray


class Zeroed(IntEnum):
    """Types that GGUF has not: blocks of 32 inputs with a float16 scale, an int8 z, and values q of 4 or 8 bits.

    A weight is (q + z) * scale; q of 8 bits has a sign, and 16 inputs after the first ones are in the upper halves of bytes.
    """

    ZERO4 = 1004
    ZERO8 = 1008


StoredType: TypeAlias = GGMLQuantizationType | Zeroed


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor: rows of values, or of quantised blocks."""

    rows: NDArray[np.uint8]  # [rows, bytes]
    type: StoredType
    shape: tuple[int, ...]
    mapping: mmap.mmap | None = None  # of its file

    def release(self) -> None:
        """Gives the memory of the file's pages back to the system, which reads them again when they are needed."""
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def take(self, places: NDArray[np.int64] | slice) -> Stored:
        """Some of the rows. Of a vector, some of the values."""
        if len(self.shape) == 1:
            width = self.rows.shape[1] // self.shape[0]
            values = self.rows.reshape(-1, width)[places]
            return replace(self, rows=values.reshape(1, -1), shape=(len(values),))
        found = self.rows[places]
        return replace(self, rows=found, shape=(len(found), *self.shape[1:]))

    def floats(self, start: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """The values of rows as float32, of the tensor's shape."""
        rows = np.ascontiguousarray(self.rows[start:end])
        values = dequantize_zeroed(rows, self.type) if isinstance(self.type, Zeroed) else quants.dequantize(rows, self.type)
        values = values.astype(np.float32, copy=False)
        found: NDArray[np.float32] = values.reshape(self.shape if len(self.shape) == 1 else (-1, *self.shape[1:]))
        return found


def dequantize_zeroed(rows: NDArray[np.uint8], kind: Zeroed) -> NDArray[np.float32]:
    """The weights of rows of blocks, float32 [rows, inputs]."""
    blocks = rows.reshape(len(rows), -1, 19 if kind == Zeroed.ZERO4 else 35)
    scales, zeros, values = np.split(blocks, [2, 3], -1)
    if kind == Zeroed.ZERO4:
        values = np.concatenate([values & 15, values >> 4], -1)
    steps = values.view(np.int8).astype(np.float32) + zeros.view(np.int8)
    found: NDArray[np.float32] = (steps * scales.view(np.float16).astype(np.float32)).reshape(len(rows), -1)
    return found
