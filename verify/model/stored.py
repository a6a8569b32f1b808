"""A tensor as a file stores it. Imports no torch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor: rows of values, or of quantised blocks."""

    rows: NDArray[np.uint8]  # [rows, bytes]
    type: GGMLQuantizationType
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
        rows = self.rows[start:end]
        values = quants.dequantize(np.ascontiguousarray(rows), self.type).astype(np.float32, copy=False)
        found: NDArray[np.float32] = values.reshape(self.shape if len(self.shape) == 1 else (-1, *self.shape[1:]))
        return found
