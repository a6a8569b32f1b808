"""The KV cache of one session slot: one preallocated tensor, written in place; a commit moves the accepted rows.

Rows beyond `length` are scratch space. A fork shares the whole pages of its source by reference, so swapped-out slots hold one
copy of a shared prefix. On a GPU, `verify.model.gpu.paged_cache` implements the same methods over a pool of pages. Knows
nothing about tokens or attention.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from drafters.interface import MAX_NODES
from verify.model.transfer import to_device

SPARE_POSITIONS = 32  # read with weight zero (`verify.model.cpu.ordered_attention`)
MARGIN_POSITIONS = MAX_NODES + 1 + SPARE_POSITIONS  # of a slot beyond its context; the first are the rows of one draft
PAGE_TOKENS = 256  # positions of a page; page n holds those from n * PAGE_TOKENS on


class OutOfPages(RuntimeError):
    """The pages that a forward or a cache needs are not free. Nothing was taken, written or changed."""


def page_count(rows: int, page_tokens: int) -> int:
    """The number of pages that hold `rows` rows."""
    return -(-rows // page_tokens)


@dataclass(frozen=True)
class CacheShape:
    """Layout of a model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes_for(self, positions: int) -> int:
        """Bytes of a slot of `positions`."""
        return 2 * self.layers * self.kv_heads * self.head_dim * positions * self.dtype.itemsize


@dataclass(eq=False)
class Page:
    """The rows of PAGE_TOKENS committed positions, which never change. All who hold a page have the same rows."""

    rows: torch.Tensor | None = None  # in host memory, once a slot with the page was swapped out; shape as in `Rows.parts`


class Rows(Protocol):
    """Committed rows: those of a cache, or of one that was swapped out."""

    @property
    def length(self) -> int:
        """The number of rows."""

    @property
    def pages(self) -> Sequence[Page]:
        """The leading whole pages that others may hold, too."""

    def share(self, count: int) -> list[Page]:
        """The first `count` whole pages, for another holder of the same rows."""

    def parts(self, length: int) -> Iterator[torch.Tensor]:
        """The first `length` rows page by page, [layers, 2, kv_heads, at most PAGE_TOKENS, head_dim]; may be views."""


@dataclass(frozen=True)
class SwappedRows:
    """The committed rows of a swapped-out slot, in host memory."""

    all_pages: Sequence[Page]  # the last one may have fewer rows, and is not shared then
    length: int  # rows

    @property
    def pages(self) -> Sequence[Page]:
        """The whole pages."""
        return self.all_pages[: self.length // PAGE_TOKENS]

    def share(self, count: int) -> list[Page]:
        """The first `count` whole pages, for another holder of the same rows."""
        return list(self.pages[:count])

    def parts(self, length: int) -> Iterator[torch.Tensor]:
        """The first `length` rows page by page, as in `Rows.parts`."""
        for start, page in zip(range(0, length, PAGE_TOKENS), self.all_pages, strict=False):
            assert page.rows is not None
            yield page.rows[:, :, :, : length - start]


def distinct_rows(holders: Iterable[Rows]) -> int:
    """The number of rows of all holders. A page that several hold counts once."""
    pages: set[Page] = set()
    own = 0
    for rows in holders:
        pages.update(rows.pages)
        own += rows.length - len(rows.pages) * PAGE_TOKENS
    return own + len(pages) * PAGE_TOKENS


def free_bytes(device: torch.device) -> int:
    """The device's memory that is not in use, in bytes. Returns memory that torch has cached to the device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10  # kB; counts the page cache, which is full of the weights' files
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros: rows that were never written are read with weight zero, which NaN would not survive.

    On a CPU, the OS provides memory on first write, so a slot takes the memory of its text, not of its capacity: torch.zeros
    would write every byte, and in huge pages, which numpy asks for, a few rows of each layer take the whole slot.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    untouched = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            untouched.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(untouched, dtype=dtype).view(size)


class KVCache:
    """Keys and values of up to `positions` tokens; the first `length` are committed."""

    def __init__(self, shape: CacheShape, positions: int) -> None:
        self.tensor = _zeros((shape.layers, 2, shape.kv_heads, positions, shape.head_dim), shape.dtype, shape.device)
        self.positions = positions
        self.length = 0
        self.pages: list[Page] = []  # those of `share` that no truncation has reached

    def missing_pages(self, rows: int) -> int:
        """Pages to take before `rows` more rows can be written: none, since the slot has its memory."""
        return 0

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows after the committed ones. A cache in pages raises OutOfPages, and is unchanged then."""

    def fill(self, length: int, noise: torch.Generator | None = None) -> None:
        """Replaces the contents with `length` rows of zeros, or of noise: a text for measurements."""
        self.truncate(0)
        self.reserve(length)
        self.length = length
        for part in self.parts(length):
            part.zero_() if noise is None else part.normal_(generator=noise)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, known: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [kv_heads, N, head_dim] from `length + known` to `end`; returns the rows so far, [kv_heads, end, head_dim]."""
        start = self.length + known
        end = start + key.shape[1]
        keys, values = self.tensor[layer, 0], self.tensor[layer, 1]
        keys[:, start:end] = key
        values[:, start:end] = value
        return keys[:, :end], values[:, :end]

    def commit(self, rows: list[int]) -> None:
        """Commits the rows at `length + r` for r in `rows` (ascending); moves only those that are out of place."""
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place:
            in_place += 1
        if in_place < len(rows):
            start = self.length + in_place
            index = to_device(torch.tensor(rows[in_place:]) + self.length, self.tensor.device)
            self.tensor[:, :, :, start : self.length + len(rows)] = self.tensor[:, :, :, index]
        self.length += len(rows)

    def swap_out(self) -> SwappedRows:
        """Empties the slot; copies the committed rows to host memory, except for pages that are there already."""
        length, pages = self.length, self.share(self.length // PAGE_TOKENS)
        if length % PAGE_TOKENS:
            pages.append(Page())
        for page, part in zip(pages, self.parts(length), strict=True):
            if page.rows is None:
                page.rows = part.to("cpu", copy=True)
        self.truncate(0)
        return SwappedRows(pages, length)

    def share(self, count: int) -> list[Page]:
        """The first `count` whole pages, for another holder of the same rows."""
        assert count * PAGE_TOKENS <= self.length
        self.pages += [Page() for _ in range(len(self.pages), count)]
        return self.pages[:count]

    def parts(self, length: int) -> Iterator[torch.Tensor]:
        """The first `length` rows page by page, as in `Rows.parts`; views."""
        for start in range(0, length, PAGE_TOKENS):
            yield self._part(start, min(start + PAGE_TOKENS, length))

    def _part(self, start: int, end: int) -> torch.Tensor:
        """The rows of one page, as in `Rows.parts`; a view."""
        return self.tensor[:, :, :, start:end]

    def fork(self, source: Rows, length: int) -> None:
        """Replaces the contents with the first `length` committed rows of `source`, or with all if there are fewer."""
        self.length = min(length, source.length)
        self.pages = source.share(self.length // PAGE_TOKENS)
        start = 0
        for part in source.parts(self.length):
            end = start + part.shape[3]
            self.tensor[:, :, :, start:end] = part.to(self.tensor.device)
            start = end

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on."""
        self.length = min(self.length, length)
        del self.pages[self.length // PAGE_TOKENS :]
