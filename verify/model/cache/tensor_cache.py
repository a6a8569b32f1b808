"""The cache of one session slot in tensors: keys and values, written in place, and the states of recurrent layers.

A commit moves the accepted rows. A fork shares the whole pages of its source by reference, so swapped-out slots hold one copy
of a shared prefix. Knows nothing about tokens or attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from outrider.verify.model.cache import paging
from outrider.verify.model.cache.codec import encode, noise_like
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.paging import Page, Part, Rows
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.windows import WindowedRows, reachable
from outrider.verify.model.hidden.ring import StateRing
from outrider.verify.model.memory import can_discard
from outrider.verify.model.recurrent.states import RecurrentStates, Snapshot
from outrider.verify.model.transfer import tensor_of, to_device
from outrider.verify.model.untouched import discard, zeros


class TensorCache(KVCache):
    """Keys and values of up to `positions` tokens, and the states of recurrent layers; the first `length` are committed."""

    def __init__(self, shape: CacheShape, positions: int, states: RecurrentStates | None = None) -> None:
        """`states` are those of recurrent layers; default: as `shape` describes them."""
        self.positions = positions
        self.length = 0
        self.pages: list[Page] = []
        self.dtype, self.stored_dtype = shape.dtype, shape.stored_dtype
        self.hidden = new_hidden(shape)
        self._planes: list[torch.Tensor] = []  # [planes, heads, positions, stored width]
        self._unwindowed: list[torch.Tensor] = []  # those of each tensor that belong to layers without a window, int64
        layers: list[list[torch.Tensor]] = [[] for _ in shape.layers]
        for (heads, width), planes in shape.planes.items():
            size = (len(planes), heads, positions, shape.stored_width(width))
            tensor = zeros(size, shape.stored_dtype, shape.device)
            self._planes.append(tensor)
            whole = [place for place, (layer, _) in enumerate(planes) if shape.layers[layer].window is None]
            self._unwindowed.append(torch.tensor(whole, dtype=torch.int64))
            for plane, (layer, _) in zip(tensor, planes, strict=True):
                layers[layer].append(plane)
        self.layers = [(keys, values) for keys, values in layers]  # each [heads, positions, stored width]
        self._uniform: torch.Tensor | None = None
        if shape.is_uniform:
            self._uniform = self._planes[0].view(len(shape.layers), 2, *self._planes[0].shape[1:])
        self.recurrent = states or new_states(shape)
        self.windowed: WindowedRows | None = None
        if shape.window is not None and shape.releases:
            pairs = [pair for pair, layer in zip(self.layers, shape.layers, strict=True) if layer.window is not None]
            windowed = [of_head for pair in pairs for plane in pair for of_head in plane]  # each [positions, stored width]
            self.windowed = WindowedRows(shape.window, lambda rows: discard(of_head[rows] for of_head in windowed))

    def discard(self) -> None:
        """Returns the memory of an empty cache to the system."""
        planes = [plane for layer in self.layers for plane in layer if can_discard(plane.device)]
        discard(plane for plane in planes if plane.is_contiguous())

    @property
    def tensor(self) -> torch.Tensor:
        """Keys and values of a uniform layout as stored, [layers, 2, kv_heads, positions, stored width]."""
        assert self._uniform is not None
        return self._uniform

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
            part.zero_() if noise is None else part.copy_(noise_like(part, noise))
        self.assume(length)

    def assume(self, length: int) -> None:
        """Takes `length` positions to be committed, whatever they hold, for measurements."""
        self.length = length
        if self.recurrent is not None:
            self.recurrent.assume(length)
        if self.windowed is not None:
            self.windowed.truncate(length, length)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, known: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [heads, N, width] from `length + known` to `end`; returns the rows so far, [heads, end, stored width].

        `outrider.verify.model.cache.codec.decode` gives the values of these; they are the rows themselves in a cache of their
        data type."""
        start = self.length + known
        end = start + key.shape[1]
        keys, values = self.layers[layer]
        keys[:, start:end] = encode(key, keys.dtype)
        values[:, start:end] = encode(value, values.dtype)
        return keys[:, :end], values[:, :end]

    def release(self) -> None:
        """Returns the memory of rows that no later row reads, if there is much of it."""
        for page in () if self.windowed is None else self.windowed.release(self.length):
            if page < len(self.pages):
                self.pages[page] = self.pages[page].reduced

    @property
    def released(self) -> Collection[int]:
        """As in `Rows`."""
        return () if self.windowed is None else self.windowed.released

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

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """As in `Rows`."""
        return () if self.recurrent is None else self.recurrent.snapshots

    def states(self, length: int) -> Sequence[Snapshot]:
        """As in `Rows`."""
        return () if self.recurrent is None else self.recurrent.states(length, self.length)

    def parts(self, length: int, start: int = 0) -> Iterator[torch.Tensor]:
        """As in `Rows`; views of a uniform layout."""
        for first in range(start, length, paging.PAGE_TOKENS):
            yield self._part(first, min(first + paging.PAGE_TOKENS, length))

    def _part(self, start: int, end: int) -> torch.Tensor:
        """The rows of one page, as in `Rows.parts`."""
        held = [planes[which, :, start:end] for planes, which in zip(self._planes, self._held(start), strict=True)]
        if self._uniform is not None:
            return held[0].view(len(held[0]) // 2, 2, *held[0].shape[1:])
        by_position = [each.permute(2, 0, 1, 3).flatten(1) for each in held]
        return torch.cat(by_position or [torch.empty(end - start, 0)], 1)[None, None, None]

    def _restore(self, start: int, page: Part) -> None:
        """Writes the rows of one page, as in `Rows.parts`."""
        part = tensor_of(page, self.stored_dtype)
        end, held = start + part.shape[3], self._held(start)
        sizes = [planes[which, :, :1].shape for planes, which in zip(self._planes, held, strict=True)]
        if self._uniform is not None:
            found = [part.flatten(0, 1)]
        else:
            widths = [count * heads * width for count, heads, _, width in sizes]
            rows = part[0, 0, 0, :, : sum(widths)].split(widths, 1)
            found = [
                each.view(end - start, count, heads, width).permute(1, 2, 0, 3)
                for each, (count, heads, _, width) in zip(rows, sizes, strict=True)
            ]
        for planes, which, each in zip(self._planes, held, found, strict=True):
            planes[which, :, start:end] = each.to(planes.device)

    def _held(self, start: int) -> Sequence[slice | torch.Tensor]:
        """Which planes of each tensor have the rows of the page that begins at `start`."""
        if start // paging.PAGE_TOKENS in self.released:
            return self._unwindowed
        return [slice(None)] * len(self._planes)

    def _contents(self, length: int) -> Iterable[torch.Tensor]:
        """Views of all keys and values of the first `length` positions, however laid out."""
        return [planes[:, :, :length] for planes in self._planes]

    def fork(self, source: Rows, length: int) -> None:
        """Replaces the contents with the first `length` committed rows of `source`, or with all if there are fewer.

        With recurrent layers, with those before the nearest snapshot; with released rows, as `truncate`.
        """
        before, recurrent = self.length, self.recurrent
        restore = None if recurrent is None else (lambda length: recurrent.restore(source.states(length), length))
        self.length = self._rewound(min(length, source.length), source.released, restore)
        if self.windowed is not None:
            self.windowed.replace(source.released, self.length, before)
        self._fork_hidden(source)
        self.pages = source.share(self.length // paging.PAGE_TOKENS)
        for start, part in zip(range(0, self.length, paging.PAGE_TOKENS), source.parts(self.length), strict=True):
            self._restore(start, part)

    def _fork_hidden(self, source: Rows) -> None:
        """Copies the hidden states of a source that is on the device; they are not swapped out."""
        if self.hidden is not None:
            self.hidden.copy(source.hidden if isinstance(source, TensorCache) else None, self.length)

    def _rewound(self, length: int, released: Collection[int], rewind: Callable[[int], int] | None) -> int:
        """The greatest length up to `length` that has its windows and, by `rewind`, its states."""
        while True:
            if self.windowed is not None:
                length = reachable(length, self.windowed.window, released)
            found = length if rewind is None else rewind(length)
            if found == length:
                return length
            length = found

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on.

        Possibly some before it, too: with recurrent layers (`RecurrentStates.rewind`), and where rows that windows read were
        released.
        """
        before, rewind = self.length, None if self.recurrent is None else self.recurrent.rewind
        self.length = self._rewound(min(self.length, length), self.released, rewind)
        if self.windowed is not None:
            self.windowed.truncate(self.length, before)
        if self.hidden is not None:
            self.hidden.truncate(self.length)
        del self.pages[self.length // paging.PAGE_TOKENS :]


def new_hidden(shape: CacheShape) -> StateRing | None:
    """An empty ring for a slot's hidden states."""
    if not shape.hidden_width:
        return None
    return StateRing(shape.hidden_positions, shape.hidden_width, shape.dtype, shape.device)


def new_states(shape: CacheShape) -> RecurrentStates | None:
    """A slot's states before its first token."""
    return None if shape.recurrent is None else RecurrentStates(shape.recurrent)
