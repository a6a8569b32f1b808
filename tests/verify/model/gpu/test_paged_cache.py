"""Caches in pages: the same rows as contiguous ones, pages shared by forks, and pools that run out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.codec import decode
from outrider.verify.model.cache.kv_cache import OutOfPages, Rows
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.transfer import tensor_of
from tests.patches import patched

SHAPE = CacheShape.uniform(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
tiny_pages = patched(kv_cache, PAGE_TOKENS=4)


def filled(pool: PagePool, length: int) -> PagedCache:
    cache = PagedCache(pool, 64)
    cache.fill(length, torch.Generator().manual_seed(length))
    return cache


def joined(rows: Rows) -> torch.Tensor:
    """All rows, [layers, 2, kv_heads, length, stored width]."""
    dtype = getattr(rows, "stored_dtype", torch.float32)
    parts = [tensor_of(part, dtype) for part in rows.parts(rows.length)]
    return torch.cat(parts or [torch.empty(2, 2, 3, 0, 4)], 3)


@pytest.mark.parametrize("coded", [None, torch.int8])
@pytest.mark.parametrize(("length", "known"), [(0, 0), (5, 0), (7, 3), (8, 0)])
def test_writes_and_commits_are_those_of_a_contiguous_cache(length: int, known: int, coded: torch.dtype | None) -> None:
    shape = replace(SHAPE, coded=coded)
    cache, reference = filled(PagePool(shape, 8), length), TensorCache(shape, 32)
    reference.fork(cache, length)
    new = torch.randn(2, 2, 3, 9, 4)
    cache.reserve(known + 9)
    for layer in (0, 1):
        key, value = new[layer].unbind()
        pairs = zip(cache.write(layer, key, value, known), reference.write(layer, key, value, known), strict=True)
        for found, expected in pairs:
            assert found.shape == expected.shape
            assert torch.equal(found[:, :length], expected[:, :length])
            assert torch.equal(found[:, length + known :], expected[:, length + known :])
    rows = [0, 1, *range(known + 3, known + 9, 2)]
    if known:
        rows = rows[2:]
    cache.commit(rows)
    reference.commit(rows)
    assert torch.equal(joined(cache), joined(reference))


@pytest.mark.parametrize("coded", [None, torch.int8])
def test_rows_are_restored_in_other_pages(coded: torch.dtype | None) -> None:
    pool = PagePool(replace(SHAPE, coded=coded), 4)
    cache = filled(pool, 13)
    before = joined(cache).clone()
    assert decode(before, 4, torch.float32).unique(dim=3).shape[3] == 13
    swapped = cache.swap_out()
    assert (pool.free, cache.length) == (4, 0)
    other = filled(pool, 3)
    with pytest.raises(OutOfPages, match="4 more pages of the KV cache are needed, and 3 are free"):
        cache.fork(swapped, 13)
    assert (pool.free, cache.length, cache.table) == (3, 0, [])
    other.truncate(0)
    cache.fork(swapped, 13)
    assert torch.equal(joined(cache), before)


def test_room_is_made_for_all_streams_or_none() -> None:
    pool = PagePool(SHAPE, 4)
    caches = [filled(pool, 4), filled(pool, 3), PagedCache(pool, 64)]
    with pytest.raises(OutOfPages):
        pool.reserve([(caches[0], 1), (caches[1], 1), (caches[2], 5)])
    assert [len(cache.table) for cache in caches] == [1, 1, 0]
    pool.reserve([(caches[0], 1), (caches[1], 1), (caches[2], 4)])
    assert [len(cache.table) for cache in caches] == [2, 1, 1]
    assert pool.free == 0


OPERATIONS = st.tuples(
    st.sampled_from(["write", "truncate", "swap", "fork"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, 16)
)


@settings(max_examples=50)
@given(st.lists(OPERATIONS, max_size=30))
def test_holders_of_pages_do_not_change_each_other(operations: list[tuple[str, int, int, int]]) -> None:
    """Each cache has the rows that it has written or forked, whatever others write, truncate, fork and swap."""
    pool = PagePool(SHAPE, 12)
    caches, expected = [PagedCache(pool, 64) for _ in range(3)], [[], [], []]  # type: ignore[var-annotated]
    for clock, (kind, at, source, length) in enumerate(operations):
        cache, values = caches[at], expected[at]
        if kind == "fork" and at != source:
            cache.truncate(0)
            cache.fork(caches[source], length)
            expected[at] = expected[source][: cache.length]
        elif kind == "truncate":
            cache.truncate(length)
            expected[at] = values[:length]
        elif kind == "swap":
            cache.fork(cache.swap_out(), 16)
        elif kind == "write" and cache.length < 16:
            count = min(16 - cache.length, length)
            cache.reserve(count)
            rows, accepted = clock + torch.arange(count) / 256, range(0, count, source + 1)  # others are moved
            for layer in (0, 1):
                cache.write(layer, rows[None, :, None].expand(3, -1, 4), rows[None, :, None].expand(3, -1, 4))
            cache.commit([*accepted])
            expected[at] = values + [float(rows[row]) for row in accepted]
    for cache, values in zip(caches, expected, strict=True):
        assert joined(cache)[1, 1, 2, :, 3].tolist() == values
        assert len(cache.pages) <= len(values) // 4
    for cache in caches:
        cache.truncate(0)
    assert pool.free == 12
