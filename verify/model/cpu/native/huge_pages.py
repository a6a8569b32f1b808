"""Memory for weights in huge pages.

A step reads all weights once. With pages of 4 KiB, the processor looks up addresses, and stops to prefetch, thousands of times.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from functools import cache

import numpy as np
from numpy.typing import NDArray

# The size of a huge page on x86-64 and on most ARM systems, and the alignment of parts.
PAGE_BYTES, ALIGNMENT = 2 << 20, 64
# Small weights share a mapping of this size.
SHARED_BYTES = 32 << 20


class HugePages:
    """Hands out parts of mappings. A mapping is returned to the system when none of its parts is used any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # weights may be packed in several threads
        self._left: NDArray[np.uint8] = np.empty(0, np.uint8)  # of the last mapping

    @staticmethod
    @cache
    def shared() -> HugePages:
        """The memory of all models of this process."""
        return HugePages()

    def take(self, size: int) -> NDArray[np.uint8]:
        """Zeros, uint8 [size], at an address that is a multiple of ALIGNMENT."""
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        if padded > SHARED_BYTES // 2:
            return mapped(padded)[:size]
        with self._lock:
            if padded > len(self._left):
                self._left = mapped(SHARED_BYTES)
            found, self._left = self._left[:size], self._left[padded:]
        return found


def mapped(size: int) -> NDArray[np.uint8]:
    """Zeros in a mapping of their own, uint8 [size], at the start of a huge page."""
    if sys.platform != "linux" or size == 0:
        return aligned(np.zeros(size + ALIGNMENT, np.uint8), ALIGNMENT)[:size]
    region = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return aligned(np.frombuffer(region, np.uint8), PAGE_BYTES)[:size]


def aligned(bytes: NDArray[np.uint8], alignment: int) -> NDArray[np.uint8]:
    """The bytes from the first address that is a multiple of `alignment`."""
    return bytes[-bytes.ctypes.data % alignment :]
