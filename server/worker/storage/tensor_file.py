"""Files in safetensors' format that are read and written without mapping them into memory.

A mapped file that another process cuts, or that a network file system loses, ends the process that reads it. Promises that any
file, however damaged, is a ValueError or an OSError, that a pipe or a link is not read, and that a file with holes takes no
more memory than the bounds below.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.server.system import open_regular

if TYPE_CHECKING:
    import torch

# Headers of the largest sessions have some hundred kilobytes, and their largest parts some hundred megabytes.
MAX_HEADER_BYTES, MAX_PART_BYTES = 16 << 20, 1 << 30
METADATA = "__metadata__"
BYTES = "U8"
# Safetensors' names of data types by those of numpy and torch, and the sizes of their elements.
TYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": (BYTES, 1),
    "bool": ("BOOL", 1),
}
NAMES = {name: (dtype, size) for dtype, (name, size) in TYPES.items()}


class Entry(msgspec.Struct):
    """Data type, shape and byte range of a tensor in a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # bytes from the end of the header


class TensorFile:
    def __init__(self, file: BinaryIO) -> None:
        """Raises ValueError or OSError."""
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(self._read(0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("its header is too large")
        self._start = 8 + length
        try:
            entries = msgspec.json.decode(self._read(8, length), type=dict[str, msgspec.Raw])
            self.labels = msgspec.json.decode(entries.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
            self.entries = {name: msgspec.json.decode(entry, type=Entry) for name, entry in entries.items()}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"its header is damaged: {error}") from None
        if max((entry.data_offsets[1] for entry in self.entries.values()), default=0) != self._size - self._start:
            raise ValueError("its end is missing")

    def array(self, name: str) -> NDArray[Any]:
        """An array. Raises ValueError or OSError, or TypeError if numpy does not have its data type."""
        data, dtype, shape = self._content(name)
        return np.frombuffer(data, dtype).reshape(shape)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in host memory. Raises ValueError or OSError."""
        import torch

        data, dtype, shape = self._content(name)
        kind = getattr(torch, dtype)
        return torch.frombuffer(data, dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)

    def _content(self, name: str) -> tuple[bytearray, str, list[int]]:
        """The bytes, the name of the data type and the shape of a tensor. Raises ValueError or OSError."""
        entry = self.entry(name)
        dtype, size = NAMES.get(entry.dtype, ("", 0))
        start, end = entry.data_offsets
        if not dtype or min(entry.shape, default=0) < 0 or end - start != math.prod(entry.shape) * size:
            raise ValueError(f"its part {name} is damaged")
        return self._read(self._start + start, end - start), dtype, entry.shape

    def entry(self, name: str) -> Entry:
        """Type, shape and place of a tensor. Raises ValueError."""
        if name not in self.entries:
            raise ValueError(f"its part {name} is missing")
        return self.entries[name]

    def _read(self, start: int, length: int) -> bytearray:
        if not 0 <= start <= start + length <= self._size:
            raise ValueError("its end is missing")
        if length > MAX_PART_BYTES:
            raise ValueError("a part of it is too large")
        try:
            data = bytearray(length)
        except MemoryError:
            raise ValueError("there is no memory for a part of it") from None
        self._file.seek(start)
        if self._file.readinto(data) != length:  # type: ignore[attr-defined]
            raise ValueError("its end is missing")
        return data


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """A file to read from. Raises ValueError or OSError."""
    with open(path, "rb", opener=open_regular) as file:
        yield TensorFile(file)


def write_tensors(file: BinaryIO, tensors: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> None:
    """Writes arrays and tensors in safetensors' format, the widest types first, so that all are aligned. Raises OSError."""
    layout = dict(sorted(tensors.items(), key=lambda each: -type_of(each[1])[1]))
    file.write(header(layout, labels or {}))
    for tensor in layout.values():
        file.write(content_of(tensor))


def header(layout: Mapping[str, Any], labels: Mapping[str, str]) -> bytes:
    """The header of a file with these tensors one after the other."""
    entries: dict[str, Any] = {METADATA: labels}
    at = 0
    for name, tensor in layout.items():
        kind, size = type_of(tensor)
        end = at + math.prod(tensor.shape) * size
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def type_of(tensor: NDArray[Any] | torch.Tensor) -> tuple[str, int]:
    """Safetensors' name of the data type, and the size of an element."""
    return TYPES[str(tensor.dtype).removeprefix("torch.")]


def content_of(tensor: NDArray[Any] | torch.Tensor) -> memoryview:
    """The bytes of an array, or of a tensor in host memory."""
    if not isinstance(tensor, np.ndarray):
        from outrider.verify.model.transfer import bytes_of  # imports torch

        tensor = bytes_of(tensor.reshape(-1))
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
