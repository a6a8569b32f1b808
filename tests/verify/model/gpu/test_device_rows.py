"""The inputs of a forward in device memory: slot, text length, rows and ancestor bits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.interface import DraftTree
from tests.trees import trees
from verify.model.batch import ForwardBatch
from verify.model.cache import CacheShape, KVCache
from verify.model.gpu.device_rows import DeviceRows, ancestor_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = CacheShape.uniform(layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)


def attended(bits: torch.Tensor, row: int) -> list[int]:
    """The rows that a row's bits select, and row 0."""
    return [0] + [bit + 1 for bit in range(64) if int(bits[row]) >> bit & 1]


@given(trees(nodes=20), st.integers(0, 30))
def test_a_forwards_inputs_are_uploaded(tree: DraftTree, length: int) -> None:
    rows, slot, batch = DeviceRows(SHAPE, 65), KVCache(SHAPE, 40), ForwardBatch.tree(7, tree)
    slot.length = length
    rows.set(slot, batch)
    assert int(rows.location[0]) == length
    assert rows.anchor.data_ptr() + int(rows.location[1]) * SHAPE.dtype.itemsize == slot.tensor.data_ptr()
    assert rows.tokens[: len(batch)].tolist() == batch.tokens.tolist()
    assert rows.depths[: len(batch)].tolist() == batch.depths.tolist()
    mask = batch.ancestor_mask()
    for row in range(len(batch)):
        assert attended(rows.bits, row) == mask[row].nonzero()[:, 0].tolist()


def test_padding_rows_attend_to_the_root_only() -> None:
    rows, slot = DeviceRows(SHAPE, 65), KVCache(SHAPE, 40)
    rows.set(slot, ForwardBatch.chain(torch.arange(20)))
    rows.set(slot, ForwardBatch.chain(torch.arange(3)))
    assert [attended(rows.bits, row) for row in range(5)] == [[0], [0, 1], [0, 1, 2], [0], [0]]
    assert not rows.tokens[3:].any() and not rows.depths[3:].any()


def test_sixty_five_rows_have_bits_for_all() -> None:
    chain = torch.ones(65, 65, dtype=torch.bool).tril()
    bits = ancestor_bits(chain)
    assert bits[0] == 0
    assert [int(b) & 0xFFFFFFFFFFFFFFFF for b in bits[[1, 2, 64]]] == [1, 3, (1 << 64) - 1]
