"""Files in safetensors' format that are read and written without mapping them into memory.

A mapped file that another process cuts, or that a network file system loses, ends the process that reads it. Promises that any
file, however damaged, is a ValueError or an OSError, and takes no more memory than its size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

METADATA = "__metadata__"
# The keys are safetensors' names.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in TYPES.items()}


class Entry(msgspec.Struct):
    """Where a tensor is in a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # bytes from the end of the header


class TensorFile:
    """An open file."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises ValueError or OSError."""
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(self._read(0, 8), "little")
        self._start = 8 + length
        try:
            entries = msgspec.json.decode(self._read(8, length), type=dict[str, msgspec.Raw])
            self.labels = msgspec.json.decode(entries.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
            self.entries = {name: msgspec.json.decode(entry, type=Entry) for name, entry in entries.items()}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"its header is damaged: {error}") from None
        if max((entry.data_offsets[1] for entry in self.entries.values()), default=0) != self._size - self._start:
            raise ValueError("its end is missing")

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in host memory. Raises ValueError or OSError."""
        entry = self.entry(name)
        dtype = DTYPES.get(entry.dtype)
        start, end = entry.data_offsets
        if dtype is None or min(entry.shape, default=0) < 0 or end - start != math.prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"its part {name} is damaged")
        data = self._read(self._start + start, end - start)
        return torch.frombuffer(data, dtype=dtype).view(entry.shape) if data else torch.empty(entry.shape, dtype=dtype)

    def entry(self, name: str) -> Entry:
        """Type, shape and place of a tensor. Raises ValueError."""
        if name not in self.entries:
            raise ValueError(f"its part {name} is missing")
        return self.entries[name]

    def _read(self, start: int, length: int) -> bytearray:
        if not 0 <= start <= start + length <= self._size:
            raise ValueError("its end is missing")
        data = bytearray(length)
        self._file.seek(start)
        if self._file.readinto(data) != length:  # type: ignore[attr-defined]
            raise ValueError("its end is missing")
        return data


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """A file to read from. Raises ValueError or OSError."""
    with open(path, "rb") as file:
        yield TensorFile(file)


def write_tensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor], labels: Mapping[str, str] | None = None) -> None:
    """Writes tensors in safetensors' format, the widest types first, so that all are aligned. Raises OSError."""
    layout = dict(sorted(tensors.items(), key=lambda each: -each[1].element_size()))
    file.write(header(layout, labels or {}))
    for tensor in layout.values():
        file.write(content_of(tensor))


def header(layout: Mapping[str, torch.Tensor], labels: Mapping[str, str]) -> bytes:
    """The header of a file with these tensors one after the other."""
    entries: dict[str, Any] = {METADATA: labels}
    at = 0
    for name, tensor in layout.items():
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def content_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory."""
    content: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return content
