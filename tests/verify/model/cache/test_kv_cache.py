"""The KV cache: commits of any accepted rows, pages that forks share, the size of a slot, and rows in 8 bits."""

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.codec import STORED, decode, encode
from outrider.verify.model.cache.kv_cache import Rows, distinct_rows
from outrider.verify.model.cache.shape import CacheShape, KVDtype, stored_width
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.transfer import tensor_of
from tests.patches import patched
from tests.servers import resident_mb

SHAPE = CacheShape.uniform(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
small_pages = patched(kv_cache, PAGE_TOKENS=4)


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
    cache, *forks = (TensorCache(SHAPE, 16) for _ in range(4))
    cache.tensor.normal_(generator=torch.Generator().manual_seed(14))
    cache.length = 14
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
    shape = CacheShape.uniform(64, 4, 64, torch.float32, torch.device("cpu"))
    before = resident_mb()
    cache = TensorCache(shape, 2048)
    cache.tensor[:, :, :, :4] = 1
    assert shape.bytes_for(2048) > 250e6
    assert resident_mb() - before < 25
    assert not cache.tensor[:, :, :, 4:].any()


EIGHT_BITS: tuple[KVDtype, ...] = ("int8", "fp8")
CPU = torch.device("cpu")


def stored(kv_dtype: KVDtype) -> torch.dtype:
    found = STORED[kv_dtype]
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_a_decoded_row_is_near_and_independent(kv_dtype: KVDtype, dtype: torch.dtype) -> None:
    rows = (torch.randn(3, 50, 18, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-8, 42)[:, None]).to(dtype)
    rows = rows.nan_to_num(posinf=0.0, neginf=0.0)
    rows[0, 0] = 0.0
    coded = encode(rows, stored(kv_dtype))
    assert coded.shape[-1] == stored_width(18) == 24
    assert torch.equal(encode(rows[1:, 7:8], stored(kv_dtype)).view(torch.uint8), coded[1:, 7:8].view(torch.uint8))
    again = decode(coded, 18, dtype)
    largest = rows.abs().amax(-1, keepdim=True)
    level = largest / 127 if kv_dtype == "int8" else rows.abs() / 16 + largest / 448 / 512
    assert ((again - rows).abs() <= 1.05 * level).all()
    assert not again[0, 0].any()


def test_nan_is_not_hidden() -> None:
    rows = torch.tensor([[1.0, torch.nan], [1.0, 2.0]])
    for kv_dtype in EIGHT_BITS:
        assert decode(encode(rows, stored(kv_dtype)), 2, torch.float32).isnan().any(-1).tolist() == [True, False]


@pytest.mark.parametrize("window", [None, 70])
def test_blocks_of_a_long_text_have_the_sum_of_the_whole(window: int | None) -> None:
    """The text is longer than a block, and the window's first block lies beyond it."""
    shape = replace(CacheShape.uniform(1, 2, 16, torch.float32, CPU), coded=torch.int8)
    generator = torch.Generator().manual_seed(0)
    cache, plain = TensorCache(shape, 2300), TensorCache(replace(shape, coded=None), 2300)
    cache.fill(2200, generator)
    plain.length = 2200
    plain.tensor.copy_(decode(cache.tensor, 16, torch.float32))
    query, key, value = (torch.randn(heads, 3, 16, generator=generator) for heads in (4, 2, 2))
    given = [decode(encode(each, torch.int8), 16, torch.float32) for each in (key, value)]
    layer, batch = Layer(0, 0.25, window), ForwardBatch.chain(torch.zeros(3, dtype=torch.int64))
    found = TorchAttention(cache, batch).attend(layer, query, key, value)
    assert torch.allclose(found, TorchAttention(plain, batch).attend(layer, query, *given), atol=1e-5)
    assert cache.tensor.nbytes * 16 == plain.tensor.nbytes * 5
