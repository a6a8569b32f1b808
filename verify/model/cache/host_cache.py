"""The cache of one session slot in host memory: keys and values as bytes, and the states of recurrent layers.

A commit moves the accepted rows. A fork shares the whole pages of its source by reference, so swapped-out slots hold one copy
of a shared prefix. Knows nothing about tokens or attention. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import HostRows, KVCache, Page, Part, Rows
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.windows import WindowedRows, reachable
from outrider.verify.model.memory import HOST, can_discard, discard, zeros

if TYPE_CHECKING:
    from outrider.verify.model.hidden_states import StateRing
    from outrider.verify.model.recurrent.states import RecurrentStates, Snapshot


class HostCache(KVCache):
    """Keys and values of up to `positions` tokens, and the states of recurrent layers; the first `length` are committed."""

    def __init__(self, shape: CacheShape, positions: int, states: RecurrentStates | None = None) -> None:
        self.positions = positions
        self.length = 0
        self.pages: list[Page] = []
        self.dtype, self.stored_dtype = shape.dtype, shape.stored_dtype
        self.hidden = new_hidden(shape)
        self._planes: list[HostRows] = []  # [planes, heads, positions, bytes of a stored row]
        self._unwindowed: list[NDArray[np.int64]] = []  # those of each array that belong to layers without a window
        layers: list[list[HostRows]] = [[] for _ in shape.layers]
        for (heads, width), planes in shape.planes.items():
            array = zeros((len(planes), heads, positions, shape.stored_width(width) * shape.stored_dtype.itemsize))
            self._planes.append(array)
            whole = [place for place, (layer, _) in enumerate(planes) if shape.layers[layer].window is None]
            self._unwindowed.append(np.array(whole, np.int64))
            for plane, (layer, _) in zip(array, planes, strict=True):
                layers[layer].append(plane)
        self.layers = [(keys, values) for keys, values in layers]  # each [heads, positions, bytes]
        self._is_uniform = shape.is_uniform
        self.recurrent = states
        self.windowed: WindowedRows | None = None
        if shape.window is not None and shape.releases:
            pairs = [pair for pair, layer in zip(self.layers, shape.layers, strict=True) if layer.window is not None]
            windowed = [of_head for pair in pairs for plane in pair for of_head in plane]  # each [positions, bytes]
            self.windowed = WindowedRows(shape.window, lambda rows: discard(of_head[rows] for of_head in windowed))

    def discard(self) -> None:
        """Returns the memory of an empty cache to the system."""
        if can_discard(HOST):
            discard(self._planes)

    def fill(self, length: int, noise: Any = None) -> None:
        """Replaces the contents with `length` rows of zeros, and states of zeros: a text for measurements."""
        self.truncate(0)
        self.reserve(length)
        for part in self._contents(length):
            part[...] = 0
        self.assume(length)

    def assume(self, length: int) -> None:
        """Takes `length` positions to be committed, whatever they hold, for measurements."""
        self.length = length
        if self.recurrent is not None:
            self.recurrent.assume(length)
        if self.windowed is not None:
            self.windowed.truncate(length, length)

    def release(self) -> None:
        """Returns the memory of rows that no later row reads, if there is much of it."""
        for page in () if self.windowed is None else self.windowed.release(self.length):
            if page < len(self.pages):
                self.pages[page] = self.pages[page].reduced

    @property
    def released(self) -> Collection[int]:
        return () if self.windowed is None else self.windowed.released

    def commit(self, rows: list[int]) -> None:
        """Commits the rows at `length + r` for r in `rows` (ascending); moves only those that are out of place."""
        if self.recurrent is not None:
            self.recurrent.commit(self.length, rows)
        if self.hidden is not None:
            self.hidden.commit(self.length, rows)
        if (in_place := next((place for place, row in enumerate(rows) if row != place), None)) is not None:
            self._move(rows, in_place)
        self.length += len(rows)

    def _move(self, rows: list[int], in_place: int) -> None:
        """Moves the rows of a commit, of which the first ones are in place."""
        start, index = self.length + in_place, np.array(rows[in_place:]) + self.length
        for planes in self._planes:
            planes[:, :, start : self.length + len(rows)] = planes[:, :, index]

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        return () if self.recurrent is None else self.recurrent.snapshots

    def states(self, length: int) -> Sequence[Snapshot]:
        return () if self.recurrent is None else self.recurrent.states(length, self.length)

    def parts(self, length: int, start: int = 0) -> Iterator[Part]:
        """See `KVCache`; returns views of a uniform layout."""
        for first in range(start, length, kv_cache.PAGE_TOKENS):
            yield self._part(first, min(first + kv_cache.PAGE_TOKENS, length))

    def _part(self, start: int, end: int) -> Part:
        """The rows of one page, as in `KVCache.parts`."""
        held = [planes[which, :, start:end] for planes, which in zip(self._planes, self._held(start), strict=True)]
        if self._is_uniform:
            return held[0].reshape(len(held[0]) // 2, 2, *held[0].shape[1:])
        by_position = [each.transpose(2, 0, 1, 3).reshape(end - start, -1) for each in held]
        return np.concatenate([*by_position, np.empty((end - start, 0), np.uint8)], 1)[None, None, None]

    def _restore(self, start: int, page: Part) -> None:
        """Writes the rows of one page, as in `KVCache.parts`."""
        page = page if isinstance(page, np.ndarray) else kv_cache.on_host(page)
        end, held = start + page.shape[3], self._held(start)
        if self._is_uniform:
            found = [page.reshape(-1, *page.shape[2:])]
        else:
            sizes = [planes[which, :, :1].shape for planes, which in zip(self._planes, held, strict=True)]
            ends = np.cumsum([count * heads * width for count, heads, _, width in sizes])
            rows = np.split(page[0, 0, 0], ends, 1)  # what follows belongs to layers that are not held
            found = [
                each.reshape(end - start, count, heads, width).transpose(1, 2, 0, 3)
                for each, (count, heads, _, width) in zip(rows, sizes, strict=False)
            ]
        for planes, which, each in zip(self._planes, held, found, strict=True):
            planes[which, :, start:end] = each

    def _held(self, start: int) -> Sequence[slice | NDArray[np.int64]]:
        """The planes of each array that have the rows of the page at `start`."""
        if start // kv_cache.PAGE_TOKENS in self.released:
            return self._unwindowed
        return [slice(None)] * len(self._planes)

    def _contents(self, length: int) -> Iterable[Any]:
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
        self.pages = source.share(self.length // kv_cache.PAGE_TOKENS)
        for start, part in zip(range(0, self.length, kv_cache.PAGE_TOKENS), source.parts(self.length), strict=True):
            self._restore(start, part)

    def _fork_hidden(self, source: Rows) -> None:
        """Copies the hidden states of a source that is on the device; they are not swapped out."""
        if self.hidden is not None:
            self.hidden.copy(source.hidden if isinstance(source, HostCache) else None, self.length)

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
        del self.pages[self.length // kv_cache.PAGE_TOKENS :]


def new_hidden(shape: CacheShape) -> StateRing | None:
    """An empty ring for a slot's hidden states."""
    if not shape.hidden_width:
        return None
    from outrider.verify.model.hidden_states import StateRing  # imports torch, as draft heads do

    return StateRing(shape.hidden_positions, shape.hidden_width, shape.dtype, shape.device)
