"""Devices, data types and memory as code knows them that imports no torch."""

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.verify import system_memory

# The parameters' numbers in glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest threshold that mallopt accepts.
LARGEST_KEPT_BYTES = 32 << 20
SMALLEST_RETURNED_BYTES = 128 << 10
MOST_KEPT_BYTES = 256 << 20


Device: TypeAlias = Any  # a torch.device, or the `HostDevice`


@dataclass(frozen=True)
class HostDevice:
    """The CPU, for code that imports no torch."""

    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


HOST = HostDevice()


class HostType(NamedTuple):
    """A data type of what caches in host memory hold."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


FLOAT32, FLOAT16, BFLOAT16 = HostType("float32", 4), HostType("float16", 2), HostType("bfloat16", 2)
INT8, FLOAT8 = HostType("int8", 1), HostType("float8_e4m3fn", 1)


def keep_freed_memory() -> None:
    """Lets this process keep the memory of tensors that were freed, for the next step's.

    Otherwise glibc returns blocks of this size to the system, and each page of a new one is mapped again: with a vocabulary of
    150,000, sampling a token takes three times as long. Other C libraries are left as they are.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)


def return_freed_memory() -> None:
    """Returns the memory of large tensors that are freed to the system at once, until `keep_freed_memory` is called.

    Otherwise glibc raises its threshold while a model is quantised, and the holes that intermediate values leave between the
    layers' weights stay in memory.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, SMALLEST_RETURNED_BYTES)


def free_bytes(device: Device) -> int:
    """The device's memory that is not in use, in bytes. Returns memory that torch has cached to the device."""
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
    return system_memory.free_bytes()


def peak_bytes(device: Device, restarts: bool = False) -> int:
    """The most of a GPU's memory that was in use, by PyTorch and by others as now; `restarts` forgets what was before."""
    import torch

    if restarts:
        free_bytes(device)
        torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free + torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device))


def has_graphics() -> bool:
    """Whether this machine may have a GPU that PyTorch can use: the drivers' devices say so on Linux."""
    if sys.platform != "linux":
        return sys.platform != "darwin"
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))


def can_discard(device: Device) -> bool:
    return device.type == "cpu" and sys.platform == "linux"


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
