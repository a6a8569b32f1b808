"""Attention in order: equal to the reference, and a row has the same bits in a tree, in company and alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree
from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import SPARE_POSITIONS
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.cpu import ordered_attention
from outrider.verify.model.cpu.ordered_attention import AttentionInputs, OrderedAttention
from outrider.verify.model.invariant_range import BLOCK, QUERY_BLOCK, InvariantRange, depth_left
from tests.trees import trees

# Some CPUs round fewer query rows differently; the server's search tries fewer first.
ROWS = InvariantRange(low=2, high=32, queries=QUERY_BLOCK)
CPU = torch.device("cpu")
Shape = tuple[int, int, int]  # key heads, query heads per key head, head_dim


def attended(
    batch: ForwardBatch, prefix: torch.Tensor, rows: torch.Tensor, shape: Shape, window: int | None, ordered: bool
) -> torch.Tensor:
    """The attention's output [heads, N, head_dim] for random `rows` after the keys and values of `prefix`."""
    kv_heads, groups, head_dim = shape
    cache = TensorCache(
        CacheShape.uniform(1, kv_heads, head_dim, prefix.dtype, CPU), prefix.shape[3] + len(batch) + SPARE_POSITIONS
    )
    cache.tensor[:, :, :, : prefix.shape[3]] = prefix
    cache.length = prefix.shape[3]
    inputs = AttentionInputs(kv_heads, head_dim, groups, prefix.dtype, ROWS)
    attention = OrderedAttention(cache, batch, inputs) if ordered else TorchAttention(cache, batch)
    query, key, value = rows.split([groups * kv_heads, kv_heads, kv_heads])
    return attention.attend(Layer(0, head_dim**-0.5, window), query, key, value)


@settings(max_examples=60)
@given(
    trees(vocabulary=5, nodes=40),
    st.sampled_from([0, 3, 63, 64, 100, 190, 700]),
    st.sampled_from([(4, 2, 32), (2, 7, 16), (1, 1, 64), (8, 4, 64)]),
    st.sampled_from([None, 20, 64, 100]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_of_a_tree_have_the_bits_of_their_paths(
    tree: DraftTree, length: int, shape: Shape, window: int | None, dtype: torch.dtype
) -> None:
    tree = tree.limit(depth_left(length))
    generator = torch.Generator().manual_seed(length)
    kv_heads, groups, head_dim = shape
    batch = ForwardBatch.tree(1, tree)
    prefix = torch.randn(1, 2, kv_heads, length, head_dim, generator=generator).to(dtype)
    rows = torch.randn((groups + 2) * kv_heads, len(batch), head_dim, generator=generator).to(dtype)
    found = attended(batch, prefix, rows, shape, window, ordered=True)
    reference = attended(batch, prefix.float(), rows.float(), shape, window, ordered=False)
    torch.testing.assert_close(found.float(), reference, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)
    for row in {0, len(tree) // 2, len(tree)}:
        path = np.flatnonzero(batch.ancestor_mask()[row])
        keys = rows[groups * kv_heads :][:, path[:-1]].view(2, kv_heads, len(path) - 1, head_dim)
        longer = torch.cat([prefix, keys[None]], 3)
        alone = attended(
            ForwardBatch.chain(torch.zeros(1, dtype=torch.long)), longer, rows[:, row : row + 1], shape, window, True
        )
        assert torch.equal(alone[:, 0], found[:, row])


def test_prompts_are_cut_at_blocks_and_trees_at_the_classs_highest_number_of_rows() -> None:
    prompt = ForwardBatch.chain(torch.arange(65))
    assert [(part.known, len(part)) for part in ordered_attention.pieces(prompt, 50, ROWS)] == [(0, 14), (14, 46), (46, 65)]
    tree = ForwardBatch(np.arange(40), np.ones(40, np.int64), np.eye(40, dtype=np.bool_))
    assert [(part.known, len(part)) for part in ordered_attention.pieces(tree, 50, ROWS)] == [(0, 32), (32, 40)]
    assert all(
        part.ancestors is not None and len(part.ancestors) == len(part) for part in ordered_attention.pieces(tree, 50, ROWS)
    )


def test_padding_rows_see_no_other_row() -> None:
    batch = ordered_attention.padded(ForwardBatch.chain(torch.tensor([7])), 3)
    assert batch.tokens.tolist() == [7, 7, 7]
    assert np.array_equal(batch.ancestor_mask(), np.eye(3))
    assert len(ordered_attention.padded(batch, 2)) == 3


@pytest.mark.parametrize(("rows", "expected"), [(1, 4), (4, 4), (31, 31), (32, 32), (34, 36), (36, 36), (65, 68)])
def test_attention_rows_are_padded_to_a_remainder_that_agrees(rows: int, expected: int) -> None:
    assert ROWS.padded_queries(rows) == expected


def test_a_draft_ends_with_its_block() -> None:
    assert [depth_left(length) for length in (0, 1, BLOCK - 1, BLOCK)] == [BLOCK - 1, BLOCK - 2, 0, BLOCK - 1]
