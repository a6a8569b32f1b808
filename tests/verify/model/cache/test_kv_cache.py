"""The KV cache: writes, commits of any accepted rows, swapping, pages that forks share, and the size of a slot."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import Rows, distinct_rows
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.transfer import tensor_of

SHAPE = CacheShape.uniform(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def small_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "PAGE_TOKENS", 4)
        yield


def filled(length: int) -> TensorCache:
    """Random contents, of which `length` positions are committed."""
    cache = TensorCache(SHAPE, 16)
    cache.tensor.normal_(generator=torch.Generator().manual_seed(length))
    cache.length = length
    return cache


@given(st.integers(0, 5), st.sets(st.integers(0, 7)))
def test_commit_moves_accepted_rows_behind_the_prefix(length: int, chosen: set[int]) -> None:
    rows = sorted(chosen)
    cache = TensorCache(SHAPE, 16)
    cache.length = length
    new = torch.arange(8.0)[None, :, None].expand(3, 8, 4)
    for layer in range(2):
        keys, values = cache.write(layer, new + 100 * layer, -new)
        assert keys.shape == values.shape == (3, length + 8, 4)
    cache.commit(rows)
    assert cache.length == length + len(rows)
    for layer in range(2):
        assert cache.tensor[layer, 0, 0, length : cache.length, 0].tolist() == [row + 100 * layer for row in rows]
        assert cache.tensor[layer, 1, 2, length : cache.length, 3].tolist() == [-row for row in rows]


def joined(rows: Rows) -> torch.Tensor:
    """All rows, [layers, 2, kv_heads, length, head_dim]."""
    return torch.cat([torch.empty(2, 2, 3, 0, 4), *(tensor_of(part, torch.float32) for part in rows.parts(rows.length))], 3)


def test_forks_share_whole_pages() -> None:
    cache, forks = filled(14), [TensorCache(SHAPE, 16) for _ in range(3)]
    for fork in forks:
        fork.fork(cache, 10)
        assert torch.equal(joined(fork), cache.tensor[:, :, :, :10])
    assert distinct_rows([cache, *forks]) == 14 + 3 * 2
    swapped = [each.swap_out() for each in (*forks, cache)]
    assert distinct_rows(swapped) == 14 + 3 * 2
    assert all(rows.pages[:2] == swapped[0].pages for rows in swapped)
    held = [weakref.ref(page.rows) for page in swapped[-1].all_pages]
    del swapped[-1]
    assert [rows() is None for rows in held] == [False, False, True, True]
    swapped.clear()
    assert not any(rows() is not None for rows in held)


def test_a_slot_takes_the_memory_of_its_text() -> None:
    def resident_mb() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    shape = CacheShape.uniform(64, 4, 64, torch.float32, torch.device("cpu"))
    before = resident_mb()
    cache = TensorCache(shape, 2048)
    cache.tensor[:, :, :, :4] = 1
    assert shape.bytes_for(2048) > 250e6
    assert resident_mb() - before < 25
    assert not cache.tensor[:, :, :, 4:].any()
