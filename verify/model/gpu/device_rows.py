"""The inputs of a forward in device memory, where kernels and captured graphs read them.

A forward has the rows of several streams, MAX_NODES + 1 of each at most, so a long chain is cut into pieces: a piece's keys are
written before any row attends, so the next piece takes them for committed text. Pieces also end with the blocks in which rows
are summed (`outrider.verify.model.gpu.attention_kernels`).

The states of a stream in recurrent layers are tensors of its own (`outrider.verify.model.recurrent.states`), which never move:
a captured graph reads their addresses.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.gpu.paged_cache import PagedCache
from outrider.verify.model.gpu.text_work import TextWork, depth_left
from outrider.verify.model.recurrent.rows import TensorStates, gather_index
from outrider.verify.model.recurrent.snapshot import SplitTensor
from outrider.verify.model.recurrent.states import ROWS, RecurrentShape
from outrider.verify.model.transfer import copy_to_device

# The fields of a row: its token, its position, and the fields that kernels read.
ROW_FIELDS = 8
# The place of a row that pads a forward.
NO_PLACE = -1


class Piece(NamedTuple):
    """Rows of one stream, MAX_NODES + 1 at most."""

    cache: PagedCache
    first: int  # the number of rows of text before the first row
    tokens: NDArray[np.int64]  # [N]
    depths: NDArray[np.int64]  # [N]
    ancestors: NDArray[np.bool_]  # [N, K + N], after K rows that are known; a row itself included, and ancestors precede it
    shift: int = 0  # see `Segment`


class DeviceRows:
    """The rows of a forward and the work of its attention, in device memory.

    Kernels read `rows`, int64 [6, max_rows]: place in the pool, depth, length and number of splits of the text before the
    stream's rows, and where the stream's pages and the row's path begin in `tables`; and `tables`, int64, which begins with the
    list of `TextWork`. A path is the places of a row's ancestors and of the row itself, by depth. A row that pads the forward
    has the place NO_PLACE: it attends to nothing, is written nowhere, and nothing attends to it.
    """

    def __init__(self, device: torch.device, max_rows: int, max_pages: int, work: TextWork) -> None:
        """Allocates for up to `max_rows` rows of streams with `max_pages` pages each."""
        self.max_rows, self.work = max_rows, work
        self._device = device
        in_tables = work.most(max_rows) + max_rows * (max_pages + MAX_NODES + 1)
        self._packed = torch.zeros(ROW_FIELDS * max_rows + in_tables, dtype=torch.int64, device=device)
        fields = self._packed[: ROW_FIELDS * max_rows].view(-1, max_rows)
        self.tokens, self.positions, self.rows = fields[0], fields[1], fields[2:]
        self.tables = self._packed[ROW_FIELDS * max_rows :]
        self.set([], max_rows)

    def set(self, pieces: Sequence[Piece], count: int) -> None:
        """Uploads the inputs of a forward of `count` rows in one copy. The caches have room for the rows."""
        self.upload(self.packed(pieces, count))

    def upload(self, packed: torch.Tensor) -> None:
        """Uploads the result of `packed`, of this or another device."""
        copy_to_device(packed, self._packed[: len(packed)])

    def packed(self, pieces: Sequence[Piece], count: int) -> torch.Tensor:
        """A forward's inputs on the host, int64 [N]. With numpy, since torch takes several times as long for so few numbers."""
        tables: list[list[int] | NDArray[np.int64]] = []
        fields = np.zeros((ROW_FIELDS, self.max_rows), np.int64)
        fields[2] = NO_PLACE
        streams = np.empty((4, len(pieces)), np.int64)
        splits = np.array([self.work.split_count(piece.first) for piece in pieces], np.int64)
        start = used = 0  # of the rows and of the tables behind the work
        for index, piece in enumerate(pieces):
            pages, length, depths = piece.cache.table, piece.first, piece.depths
            end = start + len(depths)
            rows, known_and_rows = piece.ancestors.shape
            places = np.array(piece.cache.places(length, length + known_and_rows))
            paths = places[piece.ancestors.nonzero()[1]]  # row by row, and in a row by depth
            fields[:4, start:end] = piece.tokens, depths + (length - piece.shift), places[-rows:], depths
            fields[4:7, start:end] = [[length], [splits[index]], [used]]
            fields[7, start:end] = used + len(pages) + (depths + 1).cumsum() - depths - 1
            streams[:, index] = start, len(depths), length, used
            tables += [pages, paths]
            start, used = end, used + len(pages) + len(paths)
        work = self.work.listed(streams, splits, count)
        fields[6:, :start] += len(work)
        return torch.from_numpy(np.concatenate([fields.ravel(), work, *tables]).astype(np.int64, copy=False))


def pieces_of(cache: PagedCache, batch: ForwardBatch, shift: int = 0) -> Iterator[Piece]:
    """The rows of one stream that are not known: a tree as it is, a chain cut where blocks of text end."""
    length, start = cache.length, batch.known
    if batch.ancestors is not None:
        assert len(batch) <= MAX_NODES + 1, "the tables have room for the paths of trees of this size"
        yield Piece(cache, length, batch.tokens[start:], batch.depths[start:], batch.ancestors[start:], shift)
        return
    while start < len(batch):
        tokens = batch.tokens[start : start + 1 + depth_left(length + start)]
        yield Piece(cache, length + start, tokens, np.arange(len(tokens)), np.tri(len(tokens), dtype=np.bool_), shift)
        start += len(tokens)


WORD_BITS = 64
# The words of a row's path.
WORDS = -(-ROWS // WORD_BITS)
STREAM_FIELDS = 8
# The stream of a row that pads a forward.
NO_STREAM = -1


class DeviceStates:
    """The streams of a forward in the recurrent layers of one device.

    Kernels read `rows`, int64 [1 + WORDS + window + 1, max_rows]: stream, path (`path_words`), and the places that a
    convolution reads (`gather_index`); `streams`, int64 [STREAM_FIELDS, max_rows]: first row, number of rows, rows to fold into
    the state, and addresses of matrices, keys, writes, decays and inputs. A row that pads the forward has the stream NO_STREAM.
    """

    def __init__(self, shape: RecurrentShape, max_rows: int, part: int = 0, first: int = 0) -> None:
        """`shape` is that of the device's layers, which are the part `part` of all, from the layer `first` on."""
        self.shape, self.first, self._part = shape, first, part
        row_fields = 1 + WORDS + shape.window + 1
        self._packed = torch.zeros(row_fields + STREAM_FIELDS, max_rows, dtype=torch.int64, device=shape.device)
        self.rows, self.streams = self._packed[:row_fields], self._packed[row_fields:]
        self.set([])

    def set(self, segments: Sequence[Segment]) -> list[int]:
        """Uploads a forward's streams; returns the number of rows to fold into the state of each. Adopts chunks."""
        packed = np.zeros(self._packed.shape, np.int64)  # as in `DeviceRows.packed`
        rows, streams = packed[: len(self.rows)], packed[len(self.rows) :]
        rows[0] = NO_STREAM
        pending, start = [], 0
        for index, (cache, batch, *_) in enumerate(segments):
            states, ancestors = cast(TensorStates, cache.recurrent), batch.ancestor_mask()
            pending.append(states.pending(cache.length))
            end = start + len(batch)
            rows[0, start:end] = index
            rows[1 : 1 + WORDS, start:end] = path_words(ancestors)
            rows[1 + WORDS :, start:end] = gather_index(ancestors, 0, self.shape.window).T
            buffers = (states.matrices, states.keys, states.writes, states.decays, states.inputs)
            own = (each.parts[self._part] if isinstance(each, SplitTensor) else each for each in buffers)
            streams[:, index] = start, len(batch), pending[-1], *(each.data_ptr() for each in own)
            start = end
        copy_to_device(torch.from_numpy(packed), self._packed)
        return pending


def states_of(shape: RecurrentShape | None, max_rows: int) -> list[DeviceStates]:
    """Tables for the recurrent layers on each device; empty if a model has none."""
    parts = [] if shape is None else shape.parts
    ends = accumulate((max(part.convolutions, part.states) for part in parts), initial=0)
    return [DeviceStates(part, max_rows, number, first) for (number, part), first in zip(enumerate(parts), ends, strict=False)]


def path_words(ancestors: NDArray[np.bool_]) -> NDArray[np.int64]:
    """bool [N, N] to int64 [WORDS, N]: bit j of word w says that the row descends from row 64 w + j, or is it."""
    padded = np.zeros((len(ancestors), WORDS * WORD_BITS), np.bool_)
    padded[:, : len(ancestors)] = ancestors
    return np.packbits(padded, 1, "little").view("<i8").T
