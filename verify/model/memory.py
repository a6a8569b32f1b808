"""The memory of devices: how much is free, and tensors that take what is written to them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

# The parameters' numbers in glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest threshold that mallopt accepts.
LARGEST_KEPT_BYTES = 32 << 20
SMALLEST_RETURNED_BYTES = 128 << 10
MOST_KEPT_BYTES = 256 << 20
# Python has this constant from 3.13 on.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


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


def free_bytes(device: torch.device) -> int:
    """The device's memory that is not in use, in bytes. Returns memory that torch has cached to the device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
    return min([system_bytes(), *(max(0, limit - used) for limit, used in container_limits())])


def system_bytes(root: Path = Path("/")) -> int:
    """The machine's free memory, in bytes. The page cache is free: it is full of the weights' files."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10  # kB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """The limit and the use, in bytes, of each control group (version 1 or 2) that this process belongs to.

    A container may see its own group as the root of the file system, or at the path that its host sees.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        controllers, path = line.split(":", 2)[1:]
        if controllers not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = (int((mount / each / name).read_text()) for name in names)
                found.append((limit, used - reclaimable_bytes(mount / each)))
    return found


def reclaimable_bytes(group: Path) -> int:
    """The page cache of a control group that the system takes back when memory is needed."""
    fields = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    found = {name: int(value) for name, value in fields}
    return found.get("total_inactive_file", found.get("inactive_file", 0))


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


def can_discard(device: torch.device) -> bool:
    """Whether `discard` has an effect on this device."""
    return device.type == "cpu" and sys.platform == "linux"


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
