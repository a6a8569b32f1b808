"""Reads the metadata of a GGUF file, and where its tensors' values are.

Knows nothing about torch, nor about what the entries mean. The package `gguf` also reads them, but takes seconds for a large
vocabulary. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from outrider.verify.errors import ModelError

T = TypeVar("T")
MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# These are formats of the module struct.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LENGTH = struct.Struct("<Q")  # of a text
# The tensors' values are aligned to this, unless the file states another alignment.
ALIGNMENT = 32
SPLIT = "split.count"  # an entry of each of several files that hold one model
# The number of a tensor's layer stands before every other one in its name.
LAYER = re.compile(r"\D*\.(\d{1,9})\.")
# No file has as many tensors or entries; reading those of a damaged one might take minutes.
MOST = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file."""

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
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Several texts. A vocabulary has a hundred thousand, so this loop is a plain one."""
        content, position, end, unpack = self._content, self.position, len(self._content), LENGTH.unpack_from
        found = []
        for _ in range(count):
            start = position + LENGTH.size
            position = start + unpack(content, position)[0]
            if position > end:
                raise ValueError("it ends within a text")
            found.append(content[start:position].decode("utf-8", "replace"))
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalars(SCALARS[kind])[0]
        element, count = self.scalars("IQ")
        if element in SCALARS:
            return list(self.scalars(f"{count}{SCALARS[element]}"))
        if element == STRING:
            return self.texts(count)
        return [self.value(element) for _ in range(count)]

    def skip(self, kind: int) -> None:
        """Moves past a value. Lists of texts, which are vocabularies, are not decoded."""
        if kind != ARRAY:
            self.value(kind)
            return
        element, count = self.scalars("IQ")
        if element in SCALARS:
            self.position += count * struct.calcsize(f"<{SCALARS[element]}")
        elif element == STRING:
            content, position, unpack = self._content, self.position, LENGTH.unpack_from
            for _ in range(count):
                position += LENGTH.size + unpack(content, position)[0]
            self.position = position
        else:
            for _ in range(count):
                self.skip(element)


def read_metadata(file: str | Path) -> Metadata:
    """The metadata of a GGUF file. Raises ModelError."""
    return reading(file, read)


def read_entries(file: str | Path, prefix: str) -> dict[str, Any]:
    """The entries of a GGUF file whose keys begin with `prefix`, without decoding the others. Raises ModelError."""

    def read_some(cursor: Cursor, _: int) -> dict[str, Any]:
        found = {}
        for _ in range(head(cursor)[1]):
            key, (kind,) = cursor.text(), cursor.scalars("I")
            if key.startswith(prefix):
                found[key] = cursor.value(kind)
            else:
                cursor.skip(kind)
        return found

    return reading(file, read_some)


def reading(file: str | Path, work: Callable[[Cursor, int], T]) -> T:
    """Runs `work` with a cursor over a file and the file's size. Raises ModelError."""
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[: len(MAGIC)] != MAGIC:
                raise ValueError("it does not begin with GGUF")
            return work(Cursor(content), len(content))
    except Exception as error:  # whatever a damaged length, kind or entry raises
        raise ModelError(f"{str(file)!r} is not a complete GGUF file ({error}); download it again.") from None


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
