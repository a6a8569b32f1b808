"""The packed weights of a model in a file, which later starts and other servers map instead of packing again, or in memory.

A file has the weights one after the other in the order in which they are packed, each at a multiple of ALIGNMENT. Its name says
which model, which rounding and which variant of the library it is for. It is written under another name first, so it is whole.

Memory is in huge pages: a step reads all weights once, and with pages of 4 KiB, the processor looks up addresses, and stops to
prefetch, thousands of times. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import mmap
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.model.cpu.native.library import compiled_library, variant

try:
    import fcntl
except ImportError:  # Windows, where nobody removes a file that is open
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("outrider.worker")
# The version of the files. It changes with the layout of packed weights.
FORMAT, SUFFIX, PARTIAL = 3, ".packed", ".partial"
NOT_KEPT = "the packed weights are not kept: %s"
# Smaller models are packed in a moment.
LEAST_BYTES = 64 << 20
# All files of a folder, and the share of the free disk that a new one may take. Those that were used longest ago are removed.
MOST_BYTES, FREE_SHARE = 64 << 30, 0.5
# What names a file's content: its size and time, and this much of its beginning.
READ_BYTES = 1 << 20

# The size of a huge page on x86-64 and on most ARM systems, and the alignment of parts.
PAGE_BYTES, ALIGNMENT = 2 << 20, 64
# Small weights share a mapping of this size.
SHARED_BYTES = 32 << 20

# Packs weights into a place, or else into memory that is used for each part. Yields the parts, one after the other.
Parts: TypeAlias = Callable[[NDArray[np.uint8] | None], Iterator[NDArray[np.uint8]]]


class PackedFile:
    """Memory of a model's weights: a mapped file, which is written first if it is absent, or new memory without a file.

    A new file is written while it is mapped, and never through its mapping: a disk that is full is an OSError.
    """

    def __init__(self, file: Path | None = None, nbytes: int = 0) -> None:
        """`nbytes` are about those of the weights. Few of them, or too many for the disk, get new memory. Raises OSError."""
        self._file, self.taken = file, 0  # bytes of all weights so far
        self._content = None if file is None else mapped(file)
        self._new: int | None = None  # the descriptor of a file that is written
        if file is not None and self._content is None and nbytes >= LEAST_BYTES:
            self._create(file.parent, nbytes)

    def _create(self, folder: Path, nbytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = min(MOST_BYTES, int(FREE_SHARE * shutil.disk_usage(folder).free))
        if nbytes > room:
            return
        make_room(folder, nbytes)
        self._new, self._partial = new_partial(folder)
        try:  # weights keep their addresses, and the sum of their bytes is known at last
            os.truncate(self._new, room)
            self._content = np.frombuffer(mmap.mmap(self._new, room, access=mmap.ACCESS_READ), np.uint8)
        except OSError:
            self._drop()
            raise

    def _drop(self) -> None:
        assert self._new is not None
        os.close(self._new)
        Path(self._partial).unlink(missing_ok=True)

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Keeps a new file if all weights are packed; a thread waits for the disk."""
        if self._new is None:
            return
        if kind is None and self.taken:
            os.truncate(self._new, self.taken)
            arguments = (self._new, self._partial, self._file)
            threading.Thread(target=keep, args=arguments, daemon=True, name="outrider-packed").start()
        else:
            self._drop()

    @property
    def is_mapped(self) -> bool:
        """Whether the weights are a file's."""
        return self._content is not None

    def take(self, size: int, parts: Parts) -> NDArray[np.uint8]:
        """The next weights, uint8 [size]; `parts` packs them, unless the file has them.

        Raises ModelError if the file ends before, and OSError if the disk has no room for them.
        """
        start, self.taken = self.taken, self.taken + padded(size)
        if self._content is None:
            found = HugePages.shared().take(size)
            for _ in parts(found):
                pass
            return found
        if self.taken > len(self._content):
            if self._new is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._partial)
            raise ModelError(f"{str(self._file)!r} is damaged; remove it.")
        if self._new is not None:
            for part in parts(None):
                write(self._new, part.data)
            write(self._new, memoryview(bytes(padded(size) - size)))
        return self._content[start : start + size]


def write(file: int, content: memoryview) -> None:
    """Appends bytes to a file. Raises OSError."""
    while content:
        content = content[os.write(file, content) :]


def keep(new: int, partial: str, file: Path) -> None:
    """Names a new file once the disk has all of it: whatever ends the machine leaves a whole file, or none of this name."""
    with open(new, "wb"):  # which holds its lock until the name is the file's
        try:
            os.fsync(new)
        except OSError as error:  # the system may lose what it could not write
            log.error("%s cannot be written (%s); restart with another model.packed_folder, or null", file.parent, error)
            return Path(partial).unlink(missing_ok=True)
        try:
            os.replace(partial, file)
        except OSError as error:  # someone has removed it, and the next start packs again
            log.debug(NOT_KEPT, error)


def padded(size: int) -> int:
    """The bytes that weights take in a file."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def mapped(file: Path) -> NDArray[np.uint8] | None:
    try:
        with file.open("rb") as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):  # another user's file
        file.touch()  # it is in use
    return np.frombuffer(content, np.uint8)


def new_partial(folder: Path) -> tuple[int, str]:
    """A new file's descriptor and name, locked while its writer lives, so that no other start removes it. Raises OSError."""
    while True:
        new, name = tempfile.mkstemp(PARTIAL, dir=folder)
        with contextlib.suppress(OSError):  # a disk without locks
            lock(new)
        if os.fstat(new).st_nlink:
            return new, name
        os.close(new)  # it was removed before the lock


def lock(file: int, waits: bool = True) -> None:
    """Locks an open file until it is closed. Raises OSError."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def make_room(folder: Path, size: int) -> None:
    """Removes what interrupted writers have left, and the files that were used longest ago, until `size` bytes are left."""
    for left in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError), left.open("r+b") as file:
            lock(file.fileno(), waits=False)  # fails while its writer lives
            left.unlink(missing_ok=True)
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime)
    while files and sum(each.stat().st_size for each in files) + size > MOST_BYTES:
        files.pop(0).unlink(missing_ok=True)


def file_of(folder: Path | None, files: Iterable[Path], *others: object) -> Path | None:
    """The file of a model's weights, named by the model's files, `others` and the library; None without a folder."""
    if folder is None:
        return None
    library = compiled_library()
    version = None if library is None else (variant(), os.stat(library._name).st_mtime_ns)
    found = hashlib.blake2b(repr((FORMAT, version, others)).encode(), digest_size=16)
    for file in files:
        known = file.stat()
        found.update(repr((file.name, known.st_size, known.st_mtime_ns)).encode())
        with file.open("rb") as opened:
            found.update(opened.read(READ_BYTES))
    return folder.expanduser() / f"{found.hexdigest()}{SUFFIX}"


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
            return in_huge_pages(padded)[:size]
        with self._lock:
            if padded > len(self._left):
                self._left = in_huge_pages(SHARED_BYTES)
            found, self._left = self._left[:size], self._left[padded:]
        return found


def in_huge_pages(size: int) -> NDArray[np.uint8]:
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
