"""Reads the metadata of a GGUF file, and where its tensors' values are.

Knows nothing about torch, nor about what the entries mean. The package `gguf` also reads them, but takes seconds for a large
vocabulary. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.gguf.texts import read_texts

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# These are formats of the module struct.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
READING = Lock()
# Lists of more values are kept in less memory than that of Python's objects.
LONG = 1024
# The tensors' values are aligned to this, unless the file states another alignment.
ALIGNMENT = 32
SPLIT = "split.count"  # an entry of each of several files that hold one model
# The number of a tensor's layer stands before every other one in its name.
LAYER = re.compile(r"\D*\.(\d{1,9})\.")
# No file has as many tensors or entries; reading those of a damaged one might take minutes.
MOST = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]  # the last dimension is contiguous
    kind: int  # ggml's number of its type
    start: int  # start of its values in bytes from the beginning of the file


@dataclass(frozen=True)
class Metadata:
    """The entries of a file by key, its tensors by name, and the mean size of its weights."""

    entries: dict[str, Any]
    tensors: dict[str, StoredTensor]
    bits_per_weight: float


class Cursor:
    """A position in the file, moved by each read."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = len(MAGIC)

    def scalars(self, formats: str) -> tuple[Any, ...]:
        """Values in struct's formats, without padding."""
        values = struct.unpack_from(f"<{formats}", self._content, self.position)
        self.position += struct.calcsize(f"<{formats}")
        return values

    def text(self) -> str:
        (length,) = self.scalars("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self._content):
            raise ValueError("it ends within a text")
        return self._content[start : self.position].decode("utf-8", "replace")

    def texts(self, count: int) -> Sequence[str]:
        """Several texts; of a list as long as a vocabulary's, none is decoded yet."""
        found, self.position = read_texts(self._content, self.position, count)
        return found if count > LONG else [*found]

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalars(SCALARS[kind])[0]
        element, count = self.scalars("IQ")
        if element in SCALARS and count > LONG:
            return self.array(np.dtype(SCALARS[element]).newbyteorder("<"), count)
        if element in SCALARS:
            return list(self.scalars(f"{count}{SCALARS[element]}"))
        if element == STRING:
            return self.texts(count)
        return [self.value(element) for _ in range(count)]

    def array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Many values. Raises ValueError."""
        found = np.frombuffer(self._content, dtype, count, self.position).copy()
        self.position += found.nbytes
        return found


def read_metadata(file: str | Path) -> Metadata:
    """The metadata of a GGUF file, kept for who asks next. Raises ModelError."""
    try:
        state = os.stat(file)
    except OSError as error:
        raise incomplete(file, error) from None
    with READING:  # threads that ask at once wait for the first one's
        return read_version(str(file), state.st_mtime_ns, state.st_size)


@lru_cache(2)  # a model and its draft model
def read_version(file: str, modified_ns: int, size: int) -> Metadata:
    """`read_metadata` of a file that was modified at this time."""
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[: len(MAGIC)] != MAGIC:
                raise ValueError("it does not begin with GGUF")
            return read(Cursor(content), len(content))
    except Exception as error:  # whatever a damaged length, kind or entry raises
        raise incomplete(file, error) from None


def incomplete(file: str | Path, error: Exception) -> ModelError:
    return ModelError(f"{str(file)!r} is not a complete GGUF file ({error}); download it again.")


def head(cursor: Cursor) -> tuple[int, int]:
    """The numbers of tensors and of entries. Raises ValueError and struct.error."""
    (version,) = cursor.scalars("I")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, not 2 or 3")
    tensors, entries = cursor.scalars("QQ")
    if max(tensors, entries) > MOST:
        raise ValueError(f"it says that it has {tensors} tensors and {entries} entries")
    return tensors, entries


def read(cursor: Cursor, size: int) -> Metadata:
    """The metadata of a file of `size` bytes. Raises ValueError, KeyError and struct.error."""
    tensors, count = head(cursor)
    entries = {cursor.text(): cursor.value(*cursor.scalars("I")) for _ in range(count)}
    found = {cursor.text(): _tensor(cursor) for _ in range(tensors)}
    alignment = entries.get("general.alignment", ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    placed = {name: replace(tensor, start=start + tensor.start) for name, tensor in found.items()}
    declared = entries.get(f"{entries.get('general.architecture')}.block_count", 0)
    # Building the declared number of layers may take forever. A part of a split file has only some of them.
    if found and (stored := count_layers(found)) < declared and SPLIT not in entries:
        raise ValueError(f"it says that it has {declared} layers, but its tensors are those of {stored}")
    weights = sum(prod(tensor.shape) for tensor in found.values())
    return Metadata(entries, placed, 8 * (size - start) / max(weights, 1))


def count_layers(names: Iterable[str]) -> int:
    """The number of layers that tensors with these names belong to."""
    return 1 + max((int(found[1]) for name in names if (found := LAYER.match(name))), default=-1)


def _tensor(cursor: Cursor) -> StoredTensor:
    """A tensor's description, with the start of its values after that of the first."""
    (dimensions,) = cursor.scalars("I")
    shape = cursor.scalars(f"{dimensions}Q")  # the contiguous dimension first
    kind, start = cursor.scalars("IQ")
    return StoredTensor(shape[::-1], kind, start)
