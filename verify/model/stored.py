"""A tensor as a file stores it. Imports no torch."""

from __future__ import annotations

import mmap
from copy import copy
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
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


class Part(IntEnum):
    """Types of parts of quantised weights, of which `outrider.verify.model.quantized.formats` makes whole ones."""

    UINT8 = 2001
    FLOAT8 = 2002  # float8_e4m3fn


StoredType: TypeAlias = GGMLQuantizationType | Zeroed | Part


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor: rows of values, or of quantised blocks, times the rows' scales if there are some."""

    rows: NDArray[np.uint8]  # [rows, bytes]
    type: StoredType
    shape: tuple[int, ...]
    mapping: mmap.mmap | None = None  # of its file
    scales: NDArray[np.float32] | None = None  # [rows]

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
        scales = None if self.scales is None else self.scales[places]
        return replace(self, rows=found, shape=(len(found), *self.shape[1:]), scales=scales)

    def times(self, scale: float | NDArray[np.float32]) -> Stored:
        """The tensor times a number, or times numbers for its rows."""
        found = copy(self)
        scales = np.ones(prod(self.shape[:-1]), np.float32) if self.scales is None else self.scales
        object.__setattr__(found, "scales", scales * np.asarray(scale, np.float32).reshape(-1))
        return found

    def floats(self, start: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """The values of rows as float32, of the tensor's shape."""
        found = self.unscaled(start, end)
        return found if self.scales is None else found * self.scales[start:end].reshape(-1, *[1] * (found.ndim - 1))

    def unscaled(self, start: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """The same without the rows' scales."""
        rows = np.ascontiguousarray(self.rows[start:end])
        values = dequantize_zeroed(rows, self.type) if isinstance(self.type, Zeroed) else quants.dequantize(rows, self.type)
        values = values.astype(np.float32, copy=False)
        found: NDArray[np.float32] = values.reshape(self.shape if len(self.shape) == 1 else (-1, *self.shape[1:]))
        return found


def halved(pairs: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Values of 4 bits, of which neighbours share a byte, as GGUF's blocks of `size` values: halves of a block share bytes.

    The result is [blocks, size / 2].
    """
    found = pairs.reshape(-1, size // 2)
    values = np.stack([found & 15, found >> 4], -1).reshape(-1, size)
    halves: NDArray[np.uint8] = values[:, : size // 2] | values[:, size // 2 :] << 4
    return halves


def dequantize_zeroed(rows: NDArray[np.uint8], kind: Zeroed) -> NDArray[np.float32]:
    """The weights of rows of blocks, float32 [rows, inputs]."""
    blocks = rows.reshape(len(rows), -1, 19 if kind == Zeroed.ZERO4 else 35)
    scales, zeros, values = np.split(blocks, [2, 3], -1)
    if kind == Zeroed.ZERO4:
        values = np.concatenate([values & 15, values >> 4], -1)
    steps = values.view(np.int8).astype(np.float32) + zeros.view(np.int8)
    found: NDArray[np.float32] = (steps * scales.view(np.float16).astype(np.float32)).reshape(len(rows), -1)
    return found
