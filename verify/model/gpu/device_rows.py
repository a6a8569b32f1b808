"""The inputs of a forward in device memory, where a kernel or a captured graph reads them.

A forward has the rows of several streams, MAX_NODES + 1 of each at most, so a long chain is cut into pieces: a piece's keys are
written before any row attends, so the next piece takes them for committed text. Pieces also end with the blocks in which rows
are summed (`outrider.verify.model.gpu.kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.gpu.paged_cache import PagedCache
from outrider.verify.model.row_class import depth_left
from outrider.verify.model.transfer import to_device

WORD_BITS = 64
WORDS = -(-MAX_NODES // WORD_BITS)  # of a row's ancestor bits
ROW_FIELDS = 5 + WORDS  # of a row: token, position, and the fields that kernels read
STREAM_FIELDS = 4  # of a piece
NO_STREAM = -1  # of a row that pads a forward


class Piece(NamedTuple):
    """Rows of one stream, whose ancestors fit into WORDS words."""

    cache: PagedCache
    first: int  # position of the first row, which is also the number of rows of text before it
    tokens: torch.Tensor  # int64 [N]
    depths: torch.Tensor  # int64 [N]
    bits: torch.Tensor  # int64 [N, WORDS], of `ancestor_bits`


class DeviceRows:
    """The rows of a forward and the streams that they belong to, in device memory.

    Kernels read `rows`, int64 [3 + WORDS, max_rows]: stream, depth, place in the pool, and ancestor bits; `streams`, int64
    [4, max_rows]: length of the text, first row, number of rows, and where its pages begin in `pages`. A row that pads the
    forward has the stream NO_STREAM: it attends to nothing, is written nowhere, and nothing attends to it.
    """

    def __init__(self, device: torch.device, max_rows: int, max_pages: int) -> None:
        """For up to `max_rows` rows of streams with `max_pages` pages each."""
        self.max_rows = max_rows
        self._device = device
        self._fixed = (ROW_FIELDS + STREAM_FIELDS) * max_rows
        self._packed = torch.zeros(self._fixed + max_rows * max_pages, dtype=torch.int64, device=device)
        fields = self._packed[: self._fixed].view(-1, max_rows)
        self.tokens, self.positions, self.rows = fields[0], fields[1], fields[2:ROW_FIELDS]
        self.streams = fields[ROW_FIELDS:]
        self.pages = self._packed[self._fixed :]
        self.set([])

    def set(self, pieces: Sequence[Piece]) -> None:
        """Uploads a forward's inputs in one copy. The caches have room for the rows."""
        self.upload(self.packed(pieces))

    def upload(self, packed: torch.Tensor) -> None:
        """Uploads what `packed` gave, also that of another device's."""
        self._packed[: len(packed)].copy_(to_device(packed, self._device))

    def packed(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """A forward's inputs on the host, int64 [N]."""
        fields, tables = torch.zeros(self._fixed // self.max_rows, self.max_rows, dtype=torch.int64), []
        fields[2] = NO_STREAM
        start = pages = 0
        for index, piece in enumerate(pieces):
            end, table = start + len(piece.tokens), piece.cache.table
            rows, length = fields[:ROW_FIELDS, start:end], piece.first
            rows[0], rows[1], rows[2] = piece.tokens, piece.depths + length, index
            rows[3], rows[5:] = piece.depths, piece.bits.T
            rows[4] = torch.tensor(piece.cache.places(length, length + end - start))
            fields[ROW_FIELDS:, index] = torch.tensor([length, start, end - start, pages])
            tables += table
            start, pages = end, pages + len(table)
        return torch.cat([fields.flatten(), torch.tensor(tables, dtype=torch.int64)])


def pieces_of(cache: PagedCache, batch: ForwardBatch) -> Iterator[Piece]:
    """The rows of one stream: a tree as it is, a chain cut where blocks of text end. Known rows are computed again."""
    length = cache.length
    if batch.ancestors is not None:
        assert len(batch) <= MAX_NODES + 1, "a tree's ancestors must fit into the words of a row"
        yield Piece(cache, length, batch.tokens, batch.depths, ancestor_bits(batch.ancestors))
        return
    start = 0
    while start < len(batch):
        tokens = batch.tokens[start : start + 1 + depth_left(length + start)]
        chain = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        yield Piece(cache, length + start, tokens, torch.arange(len(tokens)), ancestor_bits(chain))
        start += len(tokens)


def ancestor_bits(ancestors: torch.Tensor) -> torch.Tensor:
    """bool [N, N] to int64 [N, WORDS], on the host, for N <= MAX_NODES + 1.

    Bit j of word w says that the row attends to row 1 + w * WORD_BITS + j; all attend to row 0.
    """
    bits = torch.zeros(len(ancestors), WORDS * WORD_BITS, dtype=torch.int64)
    bits[:, : len(ancestors) - 1] = ancestors[:, 1:]
    return (bits.view(-1, WORDS, WORD_BITS) << torch.arange(WORD_BITS)).sum(-1)
