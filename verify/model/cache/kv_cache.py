"""The cache of one session slot: preallocated keys and values, written in place, and the states of recurrent layers.

A commit moves the accepted rows. Rows beyond `length` are scratch space. A fork shares the whole pages of its source by
reference, so swapped-out slots hold one copy of a shared prefix. On a GPU, `verify.model.gpu.paged_cache` implements the same
methods over a pool of pages. Knows nothing about tokens or attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from drafters.interface import MAX_NODES
from verify.model.cache import paging
from verify.model.cache.paging import Page, Rows, SwappedRows
from verify.model.cache.shape import CacheShape
from verify.model.memory import zeros
from verify.model.recurrent.states import Snapshot
from verify.model.transfer import to_device

SPARE_POSITIONS = 32  # read with weight zero (`verify.model.cpu.ordered_attention`)
MARGIN_POSITIONS = MAX_NODES + 1 + SPARE_POSITIONS  # of a slot beyond its context; the first are the rows of one draft


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
        self.recurrent = shape.new_states()

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
        length, shared = self.length, self.share(self.length // paging.PAGE_TOKENS)
        snapshots = [each.to(torch.device("cpu")) for each in self.states(length)]
        if length % paging.PAGE_TOKENS:
            shared.append(Page())
        for page, part in zip(shared, self.parts(length), strict=True):
            if page.rows is None:
                page.rows = part.to("cpu", copy=True)
        self.truncate(0)
        return SwappedRows(shared, length, snapshots)

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """As in `Rows`."""
        return () if self.recurrent is None else self.recurrent.snapshots

    def states(self, length: int) -> Sequence[Snapshot]:
        """As in `Rows`."""
        return () if self.recurrent is None else self.recurrent.states(length, self.length)

    def share(self, count: int) -> list[Page]:
        """The first `count` whole pages, for another holder of the same rows."""
        assert count * paging.PAGE_TOKENS <= self.length
        self.pages += [Page() for _ in range(len(self.pages), count)]
        return self.pages[:count]

    def parts(self, length: int) -> Iterator[torch.Tensor]:
        """The first `length` rows page by page, as in `Rows.parts`; views of a uniform layout."""
        for start in range(0, length, paging.PAGE_TOKENS):
            yield self._part(start, min(start + paging.PAGE_TOKENS, length))

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
        self.pages = source.share(self.length // paging.PAGE_TOKENS)
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
        del self.pages[self.length // paging.PAGE_TOKENS :]
