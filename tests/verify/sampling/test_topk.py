"""The largest logits are those that a sort finds, ties included."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.verify.sampling.rows import in_place
from outrider.verify.sampling.topk import likeliest

DTYPES = [torch.float32, torch.bfloat16]


def logits_of(rows: int, size: int, seed: int, dtype: torch.dtype, levels: int) -> torch.Tensor:
    """Random logits [rows, size] that take few values, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * levels).round().div(levels).to(dtype)


@given(
    st.integers(1, 9),
    st.sampled_from([9, 700, 1024, 5003]),
    st.integers(0, 8),
    st.integers(0, 1 << 30),
    st.sampled_from(DTYPES),
)
def test_the_likeliest_tokens_and_their_probabilities(rows: int, size: int, count: int, seed: int, dtype: torch.dtype) -> None:
    logits = logits_of(rows, size, seed, dtype, 1000)
    arrays = likeliest(in_place(logits), count)
    assert [array.dtype for array in arrays] == [np.int32, np.float32]
    ids, probabilities = map(torch.from_numpy, arrays)
    expected = logits.float().softmax(-1)
    assert torch.equal(logits.gather(1, ids.long()), logits.topk(count, -1).values)
    assert all(len(set(row)) == count for row in ids.tolist())
    torch.testing.assert_close(
        probabilities, expected.gather(1, ids.long()), rtol=0.05 if dtype == torch.bfloat16 else 1e-5, atol=0
    )
