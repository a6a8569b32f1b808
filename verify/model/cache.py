"""The cache of one session slot: preallocated keys and values, written in place, and the states of recurrent layers.

A commit moves the accepted rows. Rows beyond `length` are scratch space. A fork shares the whole pages of its source by
reference, so swapped-out slots hold one copy of a shared prefix. On a GPU, `verify.model.gpu.paged_cache` implements the same
methods over a pool of pages. Knows nothing about tokens or attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from drafters.interface import MAX_NODES
from verify.model.hidden.ring import StateRing
from verify.model.memory import zeros
from verify.model.recurrent.states import RecurrentShape, RecurrentStates, Snapshot
from verify.model.transfer import to_device

SPARE_POSITIONS = 32  # read with weight zero (`verify.model.cpu.ordered_attention`)
MARGIN_POSITIONS = MAX_NODES + 1 + SPARE_POSITIONS  # of a slot beyond its context; the first are the rows of one draft
HIDDEN_POSITIONS = 2048  # of a text's hidden states: heads are trained on contexts of about this length
PAGE_TOKENS = 256  # positions of a page; page n holds those from n * PAGE_TOKENS on


class OutOfPages(RuntimeError):
    """The pages that a forward or a cache needs are not free. Nothing was taken, written or changed."""


def page_count(rows: int, page_tokens: int) -> int:
    """The number of pages that hold `rows` rows."""
    return -(-rows // page_tokens)


class LayerShape(NamedTuple):
    """Shape of one layer's keys and values."""

    heads: int  # key heads
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class CacheShape:
    """Layout of a model's slots."""

    layers: tuple[LayerShape, ...]  # those with attention
    dtype: torch.dtype
    device: torch.device
    recurrent: RecurrentShape | None = None  # of the layers that keep a state
    hidden_width: int = 0  # of the hidden states that a draft head reads; 0 = none are kept
    hidden_positions: int = HIDDEN_POSITIONS
    homes: tuple[torch.device, ...] = ()  # devices of the layers, if there are several; consecutive layers share one

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> CacheShape:
        """The layout of a model whose layers are alike."""
        return cls((LayerShape(kv_heads, head_dim, head_dim),) * layers, dtype, device)

    @property
    def is_uniform(self) -> bool:
        """Whether keys and values have one shape in all layers."""
        return len(set(self.layers)) == 1 and self.layers[0].key_dim == self.layers[0].value_dim

    @property
    def kv_heads(self) -> int:
        """Key heads of a uniform layout."""
        assert self.is_uniform
        return self.layers[0].heads

    @property
    def head_dim(self) -> int:
        """Width of keys and values of a uniform layout."""
        assert self.is_uniform
        return self.layers[0].key_dim

    @property
    def planes(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Which keys (0) and values (1) of which layers have the same heads and width: they are in one tensor."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for layer, (heads, key_dim, value_dim) in enumerate(self.layers):
            for part, width in enumerate((key_dim, value_dim)):
                found.setdefault((heads, width), []).append((layer, part))
        return found

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that do not depend on its positions."""
        states = 0 if self.recurrent is None else self.recurrent.slot_bytes
        return states + self.hidden_positions * self.hidden_width * self.dtype.itemsize

    def new_hidden(self) -> StateRing | None:
        """An empty ring for a slot's hidden states."""
        if not self.hidden_width:
            return None
        return StateRing(self.hidden_positions, self.hidden_width, self.dtype, self.device)

    def bytes_for(self, positions: int) -> int:
        """Bytes of the keys and values of `positions`."""
        return sum(heads * (keys + values) for heads, keys, values in self.layers) * positions * self.dtype.itemsize

    @property
    def parts(self) -> list[CacheShape]:
        """The layout on each device: its layers, and on the first what does not belong to layers."""
        found = {home: [each for each, of in zip(self.layers, self.homes, strict=True) if of == home] for home in self.homes}
        elsewhere = replace(self, recurrent=None, hidden_width=0)
        return [
            replace(self if home == self.device else elsewhere, layers=tuple(layers), device=home, homes=())
            for home, layers in found.items()
        ] or [self]


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
        """The first `length` rows page by page; may be views.

        [layers, 2, kv_heads, at most PAGE_TOKENS, head_dim], or [1, 1, 1, at most PAGE_TOKENS, width] if layers differ.
        """

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """States of recurrent layers after some of these rows, as far as they are in memory."""

    def states(self, length: int) -> Sequence[Snapshot]:
        """Those after at most `length` rows; if these are all rows, the last one is after all of them."""


@dataclass(frozen=True)
class SwappedRows:
    """The committed rows of a swapped-out slot, in host memory."""

    all_pages: Sequence[Page]  # the last one may have fewer rows, and is not shared then
    length: int  # rows
    snapshots: Sequence[Snapshot]

    def states(self, length: int) -> Sequence[Snapshot]:
        """As in `Rows`."""
        return [each for each in self.snapshots if each.length <= length]

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


def distinct_bytes(holders: Collection[Rows], shape: CacheShape) -> int:
    """The bytes of all holders' rows and states. What several hold counts once."""
    snapshots = {id(each): each.nbytes for rows in holders for each in rows.snapshots}
    return distinct_rows(holders) * shape.bytes_for(1) + sum(snapshots.values())


class KVCache:
    """Keys and values of up to `positions` tokens, and the states of recurrent layers; the first `length` are committed."""

    def __init__(self, shape: CacheShape, positions: int) -> None:
        self.positions = positions
        self.length = 0
        self.pages: list[Page] = []  # those of `share` that no truncation has reached
        self.hidden = shape.new_hidden()
        self._planes: list[torch.Tensor] = []  # [planes, heads, positions, width]
        layers: list[list[torch.Tensor]] = [[] for _ in shape.layers]
        for (heads, width), planes in shape.planes.items():
            tensor = zeros((len(planes), heads, positions, width), shape.dtype, shape.device)
            self._planes.append(tensor)
            for plane, (layer, _) in zip(tensor, planes, strict=True):
                layers[layer].append(plane)
        self.layers = [(keys, values) for keys, values in layers]  # each [heads, positions, width]
        self._uniform: torch.Tensor | None = None
        if shape.is_uniform:
            self._uniform = self._planes[0].view(len(shape.layers), 2, *self._planes[0].shape[1:])
        self.recurrent = None if shape.recurrent is None else RecurrentStates(shape.recurrent)

    @property
    def tensor(self) -> torch.Tensor:
        """Keys and values of a uniform layout, [layers, 2, kv_heads, positions, head_dim]."""
        assert self._uniform is not None
        return self._uniform

    @property
    def visible(self) -> int:
        """The committed rows that attention sees, the last ones: all."""
        return self.length

    def missing_pages(self, rows: int) -> int:
        """Pages to take before `rows` more rows can be written: none, since the slot has its memory."""
        return 0

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows after the committed ones. A cache in pages raises OutOfPages, and is unchanged then."""

    def fill(self, length: int, noise: torch.Generator | None = None) -> None:
        """Replaces the contents with `length` rows of zeros, or of noise, and states of zeros: a text for measurements."""
        self.truncate(0)
        self.reserve(length)
        for part in self._contents(length):
            part.zero_() if noise is None else part.copy_(torch.randn(part.shape, generator=noise, device=noise.device))
        self.assume(length)

    def assume(self, length: int) -> None:
        """Takes `length` positions to be committed, whatever they hold, for measurements."""
        self.length = length
        if self.recurrent is not None:
            self.recurrent.assume(length)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, known: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [heads, N, width] from `length + known` to `end`; returns the rows so far, [heads, end, width]."""
        start = self.length + known
        end = start + key.shape[1]
        keys, values = self.layers[layer]
        keys[:, start:end] = key
        values[:, start:end] = value
        return keys[:, :end], values[:, :end]

    def commit(self, rows: list[int]) -> None:
        """Commits the rows at `length + r` for r in `rows` (ascending); moves only those that are out of place."""
        if self.recurrent is not None:
            self.recurrent.commit(self.length, rows)
        if self.hidden is not None:
            self.hidden.commit(self.length, rows)
        in_place = next((place for place, row in enumerate(rows) if row != place), len(rows))
        if in_place < len(rows):
            start, index = self.length + in_place, torch.tensor(rows[in_place:]) + self.length
            for planes in self._planes:
                planes[:, :, start : self.length + len(rows)] = planes[:, :, to_device(index, planes.device)]
        self.length += len(rows)

    def swap_out(self) -> SwappedRows:
        """Empties the slot; copies the committed rows to host memory, except for pages that are there already."""
        length, pages = self.length, self.share(self.length // PAGE_TOKENS)
        snapshots = [each.to(torch.device("cpu")) for each in self.states(length)]
        if length % PAGE_TOKENS:
            pages.append(Page())
        for page, part in zip(pages, self.parts(length), strict=True):
            if page.rows is None:
                page.rows = part.to("cpu", copy=True)
        self.truncate(0)
        return SwappedRows(pages, length, snapshots)

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """As in `Rows`."""
        return () if self.recurrent is None else self.recurrent.snapshots

    def states(self, length: int) -> Sequence[Snapshot]:
        """As in `Rows`."""
        return () if self.recurrent is None else self.recurrent.states(length, self.length)

    def share(self, count: int) -> list[Page]:
        """The first `count` whole pages, for another holder of the same rows."""
        assert count * PAGE_TOKENS <= self.length
        self.pages += [Page() for _ in range(len(self.pages), count)]
        return self.pages[:count]

    def parts(self, length: int) -> Iterator[torch.Tensor]:
        """The first `length` rows page by page, as in `Rows.parts`; views of a uniform layout."""
        for start in range(0, length, PAGE_TOKENS):
            yield self._part(start, min(start + PAGE_TOKENS, length))

    def _part(self, start: int, end: int) -> torch.Tensor:
        """The rows of one page, as in `Rows.parts`."""
        if self._uniform is not None:
            return self._uniform[:, :, :, start:end]
        slices = [each.flatten(1) for each in self._slices(start, end)]
        return torch.cat(slices or [torch.empty(end - start, 0)], 1)[None, None, None]

    def _contents(self, length: int) -> Iterable[torch.Tensor]:
        """Views of all keys and values of the first `length` positions, however laid out."""
        return [planes[:, :, :length] for planes in self._planes]

    def _slices(self, start: int, end: int) -> list[torch.Tensor]:
        """Views of these positions in all planes, [positions, planes, heads, width] each."""
        return [planes[:, :, start:end].permute(2, 0, 1, 3) for planes in self._planes]

    def fork(self, source: Rows, length: int) -> None:
        """Replaces the contents with the first `length` committed rows of `source`, or with all if there are fewer.

        With recurrent layers, with those before the nearest snapshot.
        """
        self.length = min(length, source.length)
        if self.recurrent is not None:
            self.length = self.recurrent.restore(source.states(self.length), self.length)
        self._fork_hidden(source)
        self.pages = source.share(self.length // PAGE_TOKENS)
        start = 0
        for part in source.parts(self.length):
            end = start + part.shape[3]
            if self._uniform is not None:
                self._uniform[:, :, :, start:end] = part.to(self._uniform.device)
            else:
                slices = self._slices(start, end)
                widths = [each.flatten(1).shape[1] for each in slices]
                for target, rows in zip(slices, part[0, 0, 0, :, : sum(widths)].split(widths, 1), strict=True):
                    target.copy_(rows.reshape(target.shape))
            start = end

    def _fork_hidden(self, source: Rows) -> None:
        """Copies the hidden states of a source that is on the device; they are not swapped out."""
        if self.hidden is not None:
            self.hidden.copy(source.hidden if isinstance(source, KVCache) else None, self.length)

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on; with recurrent layers, possibly some before it (`RecurrentStates.rewind`)."""
        self.length = min(self.length, length)
        if self.recurrent is not None:
            self.length = self.recurrent.rewind(self.length)
        if self.hidden is not None:
            self.hidden.truncate(self.length)
        del self.pages[self.length // PAGE_TOKENS :]
