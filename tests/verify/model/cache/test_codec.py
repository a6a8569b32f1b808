"""Rows in 8 bits: how near they are, that their bits depend on nothing else, and that drafts change no answer."""

from dataclasses import replace

import pytest
import torch

from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.codec import STORED, decode, encode
from outrider.verify.model.cache.shape import CacheShape, KVDtype, stored_width
from outrider.verify.model.cache.tensor_cache import TensorCache

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
