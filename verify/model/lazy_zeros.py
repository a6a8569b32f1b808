"""Memory of a CPU that takes what is written to it, and returns it. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Python has this constant from 3.13 on.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def zeros(size: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> NDArray[Any]:
    """Zeros: rows that were never written are read with weight zero, which NaN would not survive.

    The OS provides memory on first write, so a slot takes the memory of its text, not of its capacity: in huge pages, which
    numpy asks for, a few rows of each layer would take the whole slot.
    """
    if 0 in size:
        return np.zeros(size, dtype)
    # Private for `discard`; not reserved, because a slot whose rows are released may be larger than the memory.
    untouched = mmap.mmap(-1, math.prod(size) * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            untouched.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(untouched, dtype).reshape(size)


def discard(parts: Iterable[NDArray[Any]]) -> None:
    """Returns the memory of contiguous parts of arrays of `zeros` to the system; what is read of it then is zero.

    Whole pages of the system only: at both ends of a part, less than a page keeps its contents.
    """
    library = ctypes.CDLL(None)
    for part in parts:
        assert part.flags.c_contiguous
        first = -(-part.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.ctypes.data + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
