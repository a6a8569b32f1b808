"""The inputs of a forward in device memory: rows and their ancestors, streams and their pages."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.gpu.device_rows import NO_STREAM, DeviceRows, pieces_of
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from tests.trees import trees

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = CacheShape.uniform(layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)


@settings(max_examples=30)
@given(st.lists(st.tuples(trees(nodes=20), st.integers(0, 90)), min_size=1, max_size=3))
def test_a_forwards_inputs_are_uploaded(streams: list[tuple[DraftTree, int]]) -> None:
    pool, inputs = PagePool(SHAPE, 12), DeviceRows(DEVICE, 72, 4)
    segments = []
    for tree, length in streams:
        cache = PagedCache(pool, 128)
        cache.fill(length)
        cache.reserve(65)
        segments.append((cache, ForwardBatch.tree(7, tree)))
    inputs.set([piece for cache, batch in segments for piece in pieces_of(cache, batch)])
    start = 0
    for stream, (cache, batch) in enumerate(segments):
        end, mask = start + len(batch), batch.ancestor_mask()
        length, first_row, count, first_page = inputs.streams[:, stream].tolist()
        assert (length, first_row, count) == (cache.length, start, len(batch))
        assert inputs.tables[first_page:][: len(cache.table)].tolist() == cache.table
        assert inputs.tokens[start:end].tolist() == batch.tokens.tolist()
        assert inputs.positions[start:end].tolist() == (batch.depths + length).tolist()
        numbers, depths, places, paths = inputs.rows[:, start:end].tolist()
        assert numbers == [stream] * len(batch)
        assert depths == batch.depths.tolist()
        assert places == cache.places(length, length + len(batch))
        for row, path, depth in zip(mask, paths, depths, strict=True):
            ancestors = sorted(np.flatnonzero(row).tolist(), key=depths.__getitem__)
            assert inputs.tables[path:][: depth + 1].tolist() == [places[each] for each in ancestors]
        start = end
    assert set(inputs.rows[0, start:].tolist()) == {NO_STREAM}
    assert not inputs.streams[:, len(segments) :].any()


def test_a_long_chain_is_cut_where_blocks_end() -> None:
    cache = PagedCache(PagePool(SHAPE, 4), 256)
    cache.fill(60)
    pieces = list(pieces_of(cache, ForwardBatch.chain(torch.arange(140))))
    assert [(piece.first, len(piece.tokens)) for piece in pieces] == [(60, 4), (64, 64), (128, 64), (192, 8)]
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == list(range(140))
    assert np.array_equal(pieces[0].ancestors, np.tri(4))


def test_positions_leave_out_what_pictures_before_the_rows_do_not_take() -> None:
    cache, inputs = PagedCache(PagePool(SHAPE, 4), 256), DeviceRows(DEVICE, 72, 4)
    cache.fill(40)
    cache.reserve(30)
    inputs.set(list(pieces_of(cache, ForwardBatch.chain(torch.arange(30)), shift=12)))
    assert inputs.positions[:30].tolist() == list(range(28, 58))
    assert inputs.streams[0, :2].tolist() == [40, 64]  # places in the text
