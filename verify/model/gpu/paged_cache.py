"""KV caches on a GPU as tables of pages, which come from one pool in device memory.

A page holds the keys and values of all layers for consecutive positions, in one tensor for each device, number of heads and
width. Forks share pages by reference; a page that several caches hold is copied by the first that is about to write to it. No
cache reserves a full context: a forward's pages are reserved before it starts, for all of its streams or for none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.codec import encode, noise_like
from outrider.verify.model.cache.host_cache import new_hidden
from outrider.verify.model.cache.kv_cache import OutOfPages, Rows, page_count
from outrider.verify.model.cache.shape import SCALE_BYTES, CacheShape, LayerShape
from outrider.verify.model.cache.tensor_cache import TensorCache, new_states
from outrider.verify.model.memory import free_bytes
from outrider.verify.model.transfer import tensor_of, to_device

# A pool without a plan has pages for this many caches, and at most this share of the free memory.
POOLED_CACHES, POOLED_SHARE = 8, 0.5


def pages_for(positions: int) -> int:
    """Pages that hold `positions` positions of one cache."""
    return page_count(positions, kv_cache.PAGE_TOKENS)


def unplanned_pages(shape: CacheShape, positions: int) -> int:
    """The pages of a pool without a memory plan: of some caches of `positions`, as far as they fit, but of one at least."""
    sizes = [(part.device, part.bytes_for(positions)) for part in shape.parts]
    fitting = min((int(free_bytes(device) * POOLED_SHARE) // size for device, size in sizes if size), default=POOLED_CACHES)
    return pages_for(positions) * max(1, min(POOLED_CACHES, fitting))


def by_plane(rows: torch.Tensor, planes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Parts of rows [..., stored width] for the planes of a pool (`PoolPart`)."""
    parts: tuple[torch.Tensor, ...] = rows.split([plane.shape[-1] for plane in planes], -1)
    return parts


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of `by_plane`; a view if there is one plane."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


class PoolPart(NamedTuple):
    """The keys and values of one number of heads and width on one device; `CacheShape.planes` says whose."""

    tensor: torch.Tensor  # [pages, K, heads, page_tokens, stored width]; rows of 8 bits as `planes` says

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """Views of the rows, [pages, K, heads, page_tokens, ...]; in 8 bits, of their values and of their scales.

        A page has the values of all of a head's rows before the scales, so that kernels load 16 bytes at once.
        """
        if self.tensor.itemsize > 1:
            return (self.tensor,)
        tokens, width = self.tensor.shape[3], self.tensor.shape[4] - SCALE_BYTES
        values, scales = self.tensor.flatten(3).split([tokens * width, tokens * SCALE_BYTES], 3)
        return values.unflatten(3, (tokens, width)), scales.unflatten(3, (tokens, SCALE_BYTES))


class PoolLayers(NamedTuple):
    """Consecutive layers of one shape on one device, as kernels find them."""

    device: torch.device
    shape: LayerShape
    first: int  # layer
    step: int  # from the keys of a layer to those of the next one, in a part
    keys: torch.Tensor  # of a `PoolPart`
    values: torch.Tensor
    first_key: int  # of the first layer, in the part
    first_value: int


class PagePool:
    """The keys and values of all streams. A page is a part on each device that has layers, so pages are counted once."""

    def __init__(self, shape: CacheShape, pages: int) -> None:
        self.shape = shape
        self.page_tokens = kv_cache.PAGE_TOKENS  # as in host memory
        self.groups: list[list[PoolPart]] = [[] for _ in shape.planes]  # by heads and width, and in these by device
        self.kinds: list[PoolLayers] = []
        # The planes of each layer's keys and values, [pages, heads, page_tokens, ...].
        self.layers: list[tuple[tuple[torch.Tensor, ...], ...]] = []
        for on_device in shape.parts:
            self._add(on_device, pages)
        # Places of rows, and where they are to be, by the id of the cache, which may be gone by then: forks share its pages.
        self._moves: dict[int, list[tuple[int, int]]] = {}
        self._moving = threading.Lock()  # sessions are saved by a thread that reads their rows
        self._holders = [0] * pages  # caches that hold the page
        self._free = list(range(pages))[::-1]

    def _add(self, shape: CacheShape, pages: int) -> None:
        """Allocates the layers of one device."""
        numbers, first = list(self.shape.planes), len(self.layers)
        places: dict[tuple[int, int], tuple[PoolPart, int]] = {}  # by layer, and keys (0) or values (1)
        for (heads, width), planes in shape.planes.items():
            size = (pages, len(planes), heads, self.page_tokens, shape.stored_width(width))
            part = PoolPart(torch.zeros(size, dtype=shape.stored_dtype, device=shape.device))
            self.groups[numbers.index((heads, width))].append(part)
            places |= {which: (part, place) for place, which in enumerate(planes)}
        for layer in range(len(shape.layers)):
            pair = places[layer, 0], places[layer, 1]
            self.layers.append(tuple(tuple(plane[:, place] for plane in part.planes) for part, place in pair))
        for kind, layers in groupby(range(len(shape.layers)), lambda layer: shape.layers[layer]._replace(window=None)):
            (keys, key), (values, value) = (places[start := next(layers), 0], places[start, 1])
            step = 1 + (kind.key_dim == kind.value_dim)
            self.kinds.append(PoolLayers(shape.device, kind, first + start, step, keys.tensor, values.tensor, key, value))

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def parts(self) -> list[PoolPart]:
        return [part for group in self.groups for part in group]

    @property
    def free(self) -> int:
        """The number of pages that no cache holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages for one holder. Raises OutOfPages, and takes none then."""
        if count > len(self._free):
            raise OutOfPages(f"{count} more pages of the KV cache are needed, and {self.free} are free.")
        pages = [self._free.pop() for _ in range(count)]
        self.hold(pages)
        return pages

    def reserve(self, wanted: Sequence[tuple[PagedCache, int]]) -> None:
        """Makes room for each cache's number of new rows. Raises OutOfPages, and changes none of them then."""
        missing = sum(each.missing_pages(rows) for each, rows in wanted)
        if missing > self.free:
            raise OutOfPages(f"{missing} more pages of the KV cache are needed, and {self.free} are free.")
        for each, rows in wanted:
            each.reserve(rows)

    def move(self, cache: PagedCache, moves: list[tuple[int, int]]) -> None:
        """Moves rows of a cache, from place to place, before the pool is read or written the next time."""
        if id(cache) in self._moves:  # some of its rows may have to be moved twice
            self.settle()
        with self._moving:
            self._moves[id(cache)] = moves

    def settle(self) -> None:
        """Moves rows as it was asked to, those of all caches at once. Call it before the pool is read or written."""
        with self._moving:  # until the moves are in the device's queue
            if not self._moves:
                return
            index = torch.tensor([move for moves in self._moves.values() for move in moves]).T
            self._moves = {}
            places = torch.stack([index // self.page_tokens, index % self.page_tokens])
            on_devices = {each.device: to_device(places, each.device) for each in self.shape.parts}
            for part in self.parts:
                (source, target), (source_row, target_row) = on_devices[part.tensor.device]
                for plane in part.planes:
                    plane[target, :, :, target_row] = plane[source, :, :, source_row]

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Removes a holder from each page; those without one become free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether several caches hold the page."""
        return self._holders[page] > 1


class PagedCache(TensorCache):
    """A `TensorCache` of any length in pages of a pool. The rows beyond `length` are in its own pages, too."""

    def __init__(self, pool: PagePool, positions: int) -> None:
        """An empty cache, which holds no pages. `positions` is the most that it may hold."""
        self.pool = pool
        self.positions = positions
        self.length = 0
        self.dtype, self.stored_dtype = pool.shape.dtype, pool.shape.stored_dtype
        self.pages = []
        self.recurrent = new_states(pool.shape)  # beside the pool: states have no pages
        self.windowed = None  # the pool's pages have all layers
        self.hidden = new_hidden(pool.shape)
        self.table: list[int] = []  # pages in the order of the text
        self._gathered: tuple[list[int], dict[torch.device, torch.Tensor]] = [], {}  # a table, and its copies on devices

    def __del__(self) -> None:
        self.pool.drop(self.table)

    def discard(self) -> None:
        """Nothing: an empty cache holds no pages of the pool."""

    def missing_pages(self, rows: int) -> int:
        """Pages to take before `rows` more rows can be written."""
        new = page_count(self.length + rows, self.pool.page_tokens) - len(self.table)
        return max(0, new) + len(self._shared(rows))

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows after the committed ones. Raises OutOfPages, and changes nothing then."""
        taken = self.pool.take(self.missing_pages(rows))
        for index in self._shared(rows):
            self.pool.settle()
            page = taken.pop()
            for part in self.pool.parts:
                part.tensor[page] = part.tensor[self.table[index]]
            self.pool.drop([self.table[index]])
            self.table[index] = page
        self.table += taken

    def _shared(self, rows: int) -> list[int]:
        """The indices of pages to which `rows` more rows are written, although other caches hold them, too."""
        size = self.pool.page_tokens
        written = range(self.length // size, min(len(self.table), page_count(self.length + rows, size)))
        return [index for index in written if self.pool.is_shared(self.table[index])]

    def places(self, start: int, end: int) -> list[int]:
        """The places of positions in the pool: page times page_tokens, plus the row in the page."""
        size = self.pool.page_tokens
        return [self.table[at // size] * size + at % size for at in range(start, end)]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, known: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """`TensorCache.write` after `reserve`; returns copies, because the rows are not contiguous."""
        self.pool.settle()
        size, start = self.pool.page_tokens, self.length + known
        end, found = start + key.shape[1], []
        index = self._device_table(page_count(end, size), key.device)
        for planes, new in zip(self.pool.layers[layer], (key, value), strict=True):
            parts, at = by_plane(encode(new, planes[0].dtype), planes), start
            while at < end:
                row, stop = at % size, min(end, (at // size + 1) * size)
                for plane, rows in zip(planes, parts, strict=True):
                    plane[self.table[at // size], :, row : row + stop - at] = rows[:, at - start : stop - start]
                at = stop
            found.append(together([plane.movedim(0, 1).index_select(1, index) for plane in planes]).flatten(1, 2)[:, :end])
        return found[0], found[1]

    def _device_table(self, count: int, device: torch.device) -> torch.Tensor:
        """The first `count` pages, int64 on the device; uploaded once for all its layers in a forward."""
        table = self.table[:count]
        if self._gathered[0] != table:
            self._gathered = table, {}
        if device not in self._gathered[1]:
            self._gathered[1][device] = to_device(torch.tensor(table, dtype=torch.int64), device)
        return self._gathered[1][device]

    def _move(self, rows: list[int], in_place: int) -> None:
        """The pool moves those that are out of place later on."""
        at = self.places(self.length, self.length + rows[-1] + 1)
        self.pool.move(self, [(at[row], at[place]) for place, row in enumerate(rows) if row != place])

    def fork(self, source: Rows, length: int) -> None:
        """See `HostCache.fork`. Shares the pages of a source in the same pool. Raises OutOfPages, and is unchanged then."""
        length = min(length, source.length)
        snapshots = source.states(length)
        if self.recurrent is not None:
            length = snapshots[-1].length if snapshots else 0
        count = page_count(length, self.pool.page_tokens)
        if isinstance(source, PagedCache) and source.pool is self.pool:
            table = source.table[:count]
            self.pool.hold(table)
        else:
            table = self._copied(source, length, count)
        self.pool.drop(self.table)
        self.table, self.length = table, length
        if self.recurrent is not None:
            self.recurrent.restore(snapshots, length)
        self.pages = source.share(length // self.pool.page_tokens)
        self._fork_hidden(source)

    def _copied(self, source: Rows, length: int, count: int) -> list[int]:
        """New pages with the first `length` rows of the source."""
        table = self.pool.take(count)
        self.pool.settle()
        for page, found in zip(table, source.parts(length), strict=True):
            part = tensor_of(found, self.stored_dtype)
            for group, rows in zip(self.pool.groups, self._by_group(part), strict=True):
                for own, of_device in zip(group, rows.split([own.tensor.shape[1] for own in group]), strict=True):
                    for plane, copied in zip(own.planes, by_plane(of_device, own.planes), strict=True):
                        plane[page, :, :, : part.shape[3]] = copied
        return table

    def _by_group(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The rows of one page, as in `KVCache.parts`, for each group of the pool, [K, heads, N, stored width]."""
        if self.pool.shape.is_uniform:
            return [part.flatten(0, 1)]
        sizes = [(sum(own.tensor.shape[1] for own in group), *group[0].tensor.shape[2::2]) for group in self.pool.groups]
        rows = part[0, 0, 0].split([count * heads * width for count, heads, width in sizes], 1)
        return [each.unflatten(1, size).permute(1, 2, 0, 3) for each, size in zip(rows, sizes, strict=True)]

    def _part(self, start: int, end: int) -> torch.Tensor:
        """The rows of one page, as in `KVCache.parts`; on the host if the layers are on several devices."""
        groups = []
        for group in self._views(start, end):
            rows = list(map(together, group))
            groups.append(rows[0] if len(self.pool.shape.parts) == 1 else torch.cat([each.cpu() for each in rows]))
        if self.pool.shape.is_uniform:
            layers: torch.Tensor = groups[0].unflatten(0, (-1, 2))
            return layers
        nothing = torch.empty(end - start, 0, dtype=self.stored_dtype, device=groups[0].device if groups else None)
        return torch.cat([*(each.permute(2, 0, 1, 3).flatten(1) for each in groups), nothing], 1)[None, None, None]

    def _views(self, start: int, end: int) -> Iterable[list[list[torch.Tensor]]]:
        """Views of the rows of one page, by group, device and plane."""
        self.pool.settle()
        page, row = self.table[start // self.pool.page_tokens], start % self.pool.page_tokens
        rows = slice(row, row + end - start)
        return ([[plane[page, :, :, rows] for plane in part.planes] for part in group] for group in self.pool.groups)

    def _pages(self, length: int) -> Iterable[list[torch.Tensor]]:
        """Views of the first `length` rows, by page, part, and plane."""
        size = self.pool.page_tokens
        for start in range(0, length, size):
            for group in self._views(start, min(start + size, length)):
                yield from group

    def _contents(self, length: int) -> Iterable[torch.Tensor]:
        return (view for views in self._pages(length) for view in views)

    def fill(self, length: int, noise: torch.Generator | None = None) -> None:
        super().fill(length)
        if noise is not None:
            for views in self._pages(length):
                for view, part in zip(views, by_plane(noise_like(together(views), noise), views), strict=True):
                    view.copy_(part)

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on, and their pages."""
        super().truncate(length)
        kept = page_count(self.length, self.pool.page_tokens)
        self.pool.drop(self.table[kept:])
        del self.table[kept:]
