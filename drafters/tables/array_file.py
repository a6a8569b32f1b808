"""Named arrays in one file, read through a memory map.

The format is safetensors, so a file holds no code and other tools can read it. Its metadata holds the kind of file, the
format's version and the tokenizer's fingerprint. Loading rejects files that are truncated, of another format, or built
with another tokenizer. This module does not interpret the arrays.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

VERSION = "1"
MAX_HEADER_BYTES = 1 << 20
DTYPES = {
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I32": np.int32,
    "I64": np.int64,
    "F64": np.float64,
}


class ArrayFileError(ValueError):
    """The file cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class ArrayFile:
    """A mapped file: read-only arrays by name, and its metadata."""

    path: Path
    arrays: Mapping[str, NDArray[Any]]
    byte_offsets: Mapping[str, int]  # offset of each array in the file
    metadata: Mapping[str, str]


def save(path: Path, kind: str, fingerprint: str, arrays: Mapping[str, NDArray[Any]], **metadata: str) -> None:
    """Writes a temporary file beside `path` and renames it, so that readers never see a partial file. Raises ArrayFileError."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    labels = {"kind": kind, "version": VERSION, "fingerprint": fingerprint, **metadata}
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial, labels)
        os.chmod(partial, 0o644)  # safetensors creates files that only the owner can read
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise ArrayFileError(f"{path} cannot be written: {error}.") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def check_out(path: Path, kind: str) -> None:
    """Raises ArrayFileError unless a file of this kind may be written to `path`: nothing else is lost."""
    if os.path.lexists(path):
        try:
            load(path, kind)
        except ArrayFileError:
            raise ArrayFileError(f"{path} exists and is no table of this kind; give a new file.") from None
    elif not path.parent.is_dir():
        raise ArrayFileError(f"There is no folder {path.parent} to write {path.name} to.")


def load(path: Path, kind: str, fingerprint: str | None = None) -> ArrayFile:
    """Maps the file at `path`. Raises ArrayFileError if it is unusable or its fingerprint is not `fingerprint` (None = any)."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ArrayFileError(
            f"{path} cannot be read ({error}); give the path of a file made by `outrider datastore build`."
        ) from None
    header, body = _split(path, data)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        metadata = {}
    if metadata.get("kind") != kind or metadata.get("version") != VERSION:
        found = f"kind {metadata.get('kind')!r}, version {metadata.get('version')!r}"
        raise ArrayFileError(
            f"{path} is not a version {VERSION} {kind} file ({found}); build it with `outrider datastore build`."
        )
    if fingerprint is not None and metadata.get("fingerprint") != fingerprint:
        raise ArrayFileError(f"{path} was built with another tokenizer; build it again with this model's tokenizer.")
    arrays = {name: _array(path, body, entry) for name, entry in header.items()}
    header_bytes = len(data) - len(body)
    byte_offsets = {name: header_bytes + entry["data_offsets"][0] for name, entry in header.items()}
    return ArrayFile(path, arrays, byte_offsets, metadata)


def _split(path: Path, data: NDArray[np.uint8]) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """The parsed header, and the bytes after it, from which its offsets count. Raises ArrayFileError."""
    try:
        size = int(data[:8].view(np.uint64)[0]) if len(data) >= 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError
        header = json.loads(bytes(data[8 : 8 + size]))
        if not isinstance(header, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ArrayFileError(f"{path} is not a datastore file; build one with `outrider datastore build`.") from None
    return header, data[8 + size :]


def _array(path: Path, data: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[Any]:
    """The array that a header entry describes, as a view of `data`. Raises ArrayFileError."""
    foreign = ArrayFileError(f"{path} is not a datastore file; build one with `outrider datastore build`.")
    try:
        start, stop = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        if not 0 <= start <= stop:
            raise foreign
    except (KeyError, TypeError, ValueError):
        raise foreign from None
    if stop > len(data):
        raise ArrayFileError(f"{path} is truncated; copy it again or build it again with `outrider datastore build`.")
    # np.asarray drops the memmap subclass, which is slow to slice, and keeps the read-only mapping.
    try:
        return np.asarray(data[start:stop]).view(dtype).reshape(entry["shape"])
    except (KeyError, TypeError, ValueError):
        raise foreign from None
