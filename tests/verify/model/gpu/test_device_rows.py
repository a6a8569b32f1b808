"""The inputs of a forward in device memory: rows and their ancestors, streams and their pages."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.gpu.device_rows import NO_PLACE, DeviceRows, pieces_of
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.gpu.text_work import WORK_FIELDS, TextWork
from tests.trees import trees

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = CacheShape.uniform(layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
GROUPS = 24  # query heads per key head


def new_inputs() -> DeviceRows:
    return DeviceRows(DEVICE, 72, 4, TextWork(SHAPE, GROUPS, 256, [DEVICE]))


@settings(max_examples=30)
@given(st.lists(st.tuples(trees(nodes=20), st.integers(0, 90)), min_size=1, max_size=3))
def test_a_forwards_inputs_are_uploaded(streams: list[tuple[DraftTree, int]]) -> None:
    pool, inputs = PagePool(SHAPE, 12), new_inputs()
    segments = []
    for tree, length in streams:
        cache = PagedCache(pool, 128)
        cache.fill(length)
        cache.reserve(65)
        segments.append((cache, ForwardBatch.tree(7, tree)))
    inputs.set([piece for cache, batch in segments for piece in pieces_of(cache, batch)], 72)
    start, expected = 0, []
    for cache, batch in segments:
        end, mask, length = start + len(batch), batch.ancestor_mask(), cache.length
        assert inputs.tokens[start:end].tolist() == batch.tokens.tolist()
        assert inputs.positions[start:end].tolist() == (batch.depths + length).tolist()
        places, depths, lengths, splits, first_pages, paths = inputs.rows[:, start:end].tolist()
        assert {*lengths} == {length} and {*splits} == {length // 64} and len({*first_pages}) == 1
        assert inputs.tables[first_pages[0] :][: len(cache.table)].tolist() == cache.table
        assert depths == batch.depths.tolist()
        assert places == cache.places(length, length + len(batch))
        for row, path, depth in zip(mask, paths, depths, strict=True):
            ancestors = sorted(np.flatnonzero(row).tolist(), key=depths.__getitem__)
            assert inputs.tables[path:][: depth + 1].tolist() == [places[each] for each in ancestors]
        of_stream = [start, len(batch), length, first_pages[0]]
        expected += [
            [*of_stream, tile, split] for split in range(length // 64) for tile in range(-(-len(batch) * GROUPS // 32))
        ]
        start = end
    assert set(inputs.rows[0, start:].tolist()) == {NO_PLACE}
    assert inputs.tables[0] == len(expected)
    assert inputs.tables[1:][: WORK_FIELDS * len(expected)].view(-1, WORK_FIELDS).tolist() == expected


def test_a_long_chain_is_cut_where_blocks_end() -> None:
    cache = PagedCache(PagePool(SHAPE, 4), 256)
    cache.fill(60)
    pieces = list(pieces_of(cache, ForwardBatch.chain(torch.arange(140))))
    assert [(piece.first, len(piece.tokens)) for piece in pieces] == [(60, 4), (64, 64), (128, 64), (192, 8)]
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == list(range(140))
    assert np.array_equal(pieces[0].ancestors, np.tri(4))


def test_positions_leave_out_what_pictures_before_the_rows_do_not_take() -> None:
    cache, inputs = PagedCache(PagePool(SHAPE, 4), 256), new_inputs()
    cache.fill(40)
    cache.reserve(30)
    inputs.set(list(pieces_of(cache, ForwardBatch.chain(torch.arange(30)), shift=12)), 32)
    assert inputs.positions[:30].tolist() == list(range(28, 58))
    assert inputs.rows[2, :30].tolist() == [40] * 24 + [64] * 6  # places in the text
