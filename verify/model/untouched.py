"""Tensors that take what is written to them of a CPU's memory, and return it."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Iterable

import torch

# Python has this constant from 3.13 on.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros: rows that were never written are read with weight zero, which NaN would not survive.

    On a CPU, the OS provides memory on first write, so a slot takes the memory of its text, not of its capacity: torch.zeros
    would write every byte, and in huge pages, which numpy asks for, a few rows of each layer take the whole slot.
    """
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # Private for `discard`; not reserved, because a slot whose rows are released may be larger than the memory.
    untouched = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            untouched.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(untouched, dtype=dtype).view(size)


def discard(parts: Iterable[torch.Tensor]) -> None:
    """Returns the memory of contiguous parts of tensors of `zeros` to the system; what is read of it then is zero.

    Whole pages of the system only: at both ends of a part, less than a page keeps its contents.
    """
    library = ctypes.CDLL(None)
    for part in parts:
        assert part.is_contiguous()
        first = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
