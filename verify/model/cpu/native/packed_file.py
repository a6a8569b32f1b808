"""The packed weights of a model in a file, which later starts and other servers map instead of packing them again.

A file has the weights one after the other in the order in which they are packed, each at a multiple of ALIGNMENT. Its name says
which model, which rounding and which variant of the library it is for. It is written beside and then named, so it is whole.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.model.cpu.native.huge_pages import ALIGNMENT, HugePages
from outrider.verify.model.cpu.native.library import compiled_library, variant

log = logging.getLogger("outrider.worker")
# The version of the files. It changes with the layout of packed weights.
FORMAT, SUFFIX = 3, ".packed"
# Smaller models are packed in a moment.
LEAST_BYTES = 64 << 20
# All files of a folder, and the share of the free disk that a new one may take. Those that were used longest ago are removed.
MOST_BYTES, FREE_SHARE = 64 << 30, 0.5
# What names a file's content: its size and time, and this much of its beginning.
READ_BYTES = 1 << 20


class PackedFile:
    """Memory for a model's weights: of its file if there is one, and else new memory, which `save` writes to that file."""

    def __init__(self, file: Path | None = None) -> None:
        """All memory is new if there is no `file`. `taken` are the bytes of all weights so far."""
        self._file, self.taken, self._new = file, 0, list[NDArray[np.uint8]]()
        self._content = None if file is None else mapped(file)

    @property
    def is_filled(self) -> bool:
        """Whether memory that is taken has the weights."""
        return self._content is not None

    def take(self, size: int) -> NDArray[np.uint8]:
        """Memory of the next weights, uint8 [size]. Raises ModelError if the file ends before."""
        start, self.taken = self.taken, self.taken + padded(size)
        if self._content is None:
            found = HugePages.shared().take(size)
            self._new.append(found)
            return found
        if self.taken > len(self._content):
            raise ModelError(f"{str(self._file)!r} is damaged; remove it.")
        return self._content[start : start + size]

    def save_later(self) -> None:
        """Writes new weights to the file, in a thread of its own."""
        if self._file is not None and self._new and sum(map(len, self._new)) >= LEAST_BYTES:
            threading.Thread(target=self._save, args=(self._file, self._new), daemon=True, name="outrider-packed").start()
        self._new = []

    @staticmethod
    def _save(file: Path, parts: list[NDArray[np.uint8]]) -> None:
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            size = sum(padded(len(part)) for part in parts)
            if size > min(MOST_BYTES, FREE_SHARE * shutil.disk_usage(file.parent).free):
                return
            make_room(file.parent, size)
            with partial.open("wb") as out:
                for part in parts:
                    out.write(part.data)
                    out.write(bytes(padded(len(part)) - len(part)))
            partial.replace(file)
        except OSError as error:  # the next start packs again
            log.debug("the packed weights are not kept: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink()


def padded(size: int) -> int:
    """The bytes that weights take in a file."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def mapped(file: Path) -> NDArray[np.uint8] | None:
    """The content of a file; None if there is none."""
    try:
        with file.open("rb") as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):  # another user's file
        file.touch()  # it is in use
    return np.frombuffer(content, np.uint8)


def make_room(folder: Path, size: int) -> None:
    """Removes what interrupted writers have left, and the files that were used longest ago, until `size` bytes are left."""
    for left in folder.glob("*.partial"):
        left.unlink(missing_ok=True)
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime)
    while files and sum(each.stat().st_size for each in files) + size > MOST_BYTES:
        files.pop(0).unlink(missing_ok=True)


def file_of(folder: Path | None, files: Iterable[Path], *others: object) -> Path | None:
    """The file of a model's weights, named by the model's files, `others` and the library; None without a folder."""
    if folder is None:
        return None
    library = compiled_library()
    assert library is not None
    found = hashlib.blake2b(repr((FORMAT, variant(), os.stat(library._name).st_mtime_ns, others)).encode(), digest_size=16)
    for file in files:
        known = file.stat()
        found.update(repr((file.name, known.st_size, known.st_mtime_ns)).encode())
        with file.open("rb") as opened:
            found.update(opened.read(READ_BYTES))
    return folder.expanduser() / f"{found.hexdigest()}{SUFFIX}"
