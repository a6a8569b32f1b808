"""Random access to a file's 32-bit words from compiled code, through a small page cache in the process.

Unlike a memory map, the cache bounds the resident memory, and a file that is truncated while in use reads as zeros
instead of killing the process. Not thread-safe.
"""

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import structure

# Pages are small, because reads are scattered.
PAGE_SHIFT = 6
PAGE_WORDS = 1 << PAGE_SHIFT
PAGE_BYTES = 4 * PAGE_WORDS
# Smaller files are cached whole.
SMALL_BYTES = 1 << 20


@structure
class Pages(NamedTuple):
    """A direct-mapped cache: page p of the file can only be in slot p mod S'."""

    words: NDArray[np.uint32]  # [S, PAGE_WORDS]
    numbers: NDArray[np.int64]  # [S'], a power of two >= S; the page in each slot, -1 = none
    file: int  # descriptor; -1 = in memory, with every page in its slot


def open_pages(path: Path) -> Pages:
    """Opens the file; its descriptor is closed with the last reference to the cache's `words`. Raises OSError."""
    slots = cache_bytes(path.stat().st_size) // PAGE_BYTES
    words, numbers = np.zeros((slots, PAGE_WORDS), np.uint32), np.full(slots, -1, np.int64)
    descriptor = os.open(path, os.O_RDONLY)
    weakref.finalize(words, os.close, descriptor).atexit = False
    return Pages(words, numbers, descriptor)


def cache_bytes(size: int) -> int:
    """The cache's size for a file of `size` bytes, a power of two: at most a tenth of the file, but all of a small file."""
    small = min(SMALL_BYTES, max(PAGE_BYTES, 1 << max(0, size - 1).bit_length()))
    return max(small, (1 << (size // 10).bit_length()) // 2)


def in_memory(arrays: Mapping[str, NDArray[Any]]) -> tuple[Pages, dict[str, int]]:
    """Arrays as fully cached pages, and the offset of each array in words."""
    images = {name: _words(array) for name, array in arrays.items()}
    ends = np.cumsum([len(image) for image in images.values()], dtype=np.int64)
    offsets = {name: int(end) - len(image) for (name, image), end in zip(images.items(), ends, strict=True)}
    pages = int(ends[-1]) // PAGE_WORDS + 1
    words = np.zeros((pages, PAGE_WORDS), np.uint32)
    np.concatenate(list(images.values()), out=words.reshape(-1)[: ends[-1]])
    return Pages(words, np.arange(1 << (pages - 1).bit_length(), dtype=np.int64), -1), offsets


def _words(array: NDArray[Any]) -> NDArray[np.uint32]:
    """The array's bytes as words, the last one padded with zeros."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if len(data) % 4:
        data = np.concatenate([data, np.zeros(-len(data) % 4, np.uint8)])
    return data.view(np.uint32)
