"""Committing keeps exactly the accepted rows, wherever they stood."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.model.cache import CacheShape, KVCache

SHAPE = CacheShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


@given(st.integers(0, 5), st.sets(st.integers(0, 7)))
def test_commit_moves_accepted_rows_behind_the_prefix(length: int, chosen: set[int]) -> None:
    rows = sorted(chosen)
    cache = KVCache(SHAPE, 16)
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


def test_truncate_never_lengthens() -> None:
    cache = KVCache(SHAPE, 16)
    cache.length = 3
    cache.truncate(5)
    assert cache.length == 3
    cache.truncate(1)
    assert cache.length == 1


def test_size_is_what_it_takes() -> None:
    assert SHAPE.bytes_for(16) == KVCache(SHAPE, 16).tensor.nbytes
