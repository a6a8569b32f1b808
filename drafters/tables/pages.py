"""A file's 32-bit words, read by compiled code through a small cache of the process's own.

Promises bounded memory: how much of a mapped file becomes resident is the system's choice, and can be all of it. And that
a file cut short under a running server reads as zeros, where a map would end the process. For one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from drafters.tables.kernel import kernel

PAGE_SHIFT = 6  # small: what is read stands scattered
PAGE_WORDS = 1 << PAGE_SHIFT
PAGE_BYTES = 4 * PAGE_WORDS
SMALL_BYTES = 1 << 20  # a cache is not made smaller than a file of this size

# Of the C library; numba finds it by name, so kernels that call it can be kept in its cache.
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class Pages(NamedTuple):
    """A direct-mapped cache: page p of the file stands in slot p mod S, or nowhere."""

    words: NDArray[np.uint32]  # [S, PAGE_WORDS]
    numbers: NDArray[np.int64]  # [S', a power of two >= S]; the page that stands there, -1 = none
    file: int  # descriptor; -1 = there is none, and every page is in its place


def open_pages(path: Path) -> Pages:
    """The file's pages; its descriptor stays open as long as the process. Raises OSError."""
    slots = cache_bytes(path.stat().st_size) // PAGE_BYTES
    return Pages(np.zeros((slots, PAGE_WORDS), np.uint32), np.full(slots, -1, np.int64), os.open(path, os.O_RDONLY))


def cache_bytes(size: int) -> int:
    """What is kept of a file of `size` bytes, a power of two: at most a tenth of it, but all of a small file."""
    small = min(SMALL_BYTES, max(PAGE_BYTES, 1 << max(0, size - 1).bit_length()))
    return max(small, (1 << (size // 10).bit_length()) // 2)


def in_memory(arrays: Mapping[str, NDArray[Any]]) -> tuple[Pages, dict[str, int]]:
    """Arrays as the pages of a file that is read already, and the word at which each one begins."""
    images = {name: _words(array) for name, array in arrays.items()}
    ends = np.cumsum([len(image) for image in images.values()], dtype=np.int64)
    places = {name: int(end) - len(image) for (name, image), end in zip(images.items(), ends, strict=True)}
    pages = int(ends[-1]) // PAGE_WORDS + 1
    words = np.zeros((pages, PAGE_WORDS), np.uint32)
    np.concatenate(list(images.values()), out=words.reshape(-1)[: ends[-1]])
    return Pages(words, np.arange(1 << (pages - 1).bit_length(), dtype=np.int64), -1), places


def _words(array: NDArray[Any]) -> NDArray[np.uint32]:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.concatenate([data, np.zeros(-len(data) % 4, np.uint8)]).view(np.uint32) if len(data) % 4 else data.view(np.uint32)


@kernel
def word(pages: Pages, at: int) -> int:
    """The file's 32-bit word numbered `at`."""
    page = at >> PAGE_SHIFT
    slot = page & (len(pages.numbers) - 1)
    if pages.numbers[slot] != page:
        _read(pages, page, slot)
    return int(np.int64(pages.words[slot, at & (PAGE_WORDS - 1)]))


@kernel
def _read(pages: Pages, page: int, slot: int) -> None:
    """Reads a page into its slot; what the file lacks is zeros."""
    start = pages.words.ctypes.data + slot * PAGE_BYTES
    got = max(0, _pread(pages.file, start, PAGE_BYTES, page * PAGE_BYTES))
    for i in range((got + 3) >> 2, PAGE_WORDS):
        pages.words[slot, i] = 0
    pages.numbers[slot] = page
