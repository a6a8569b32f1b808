"""TorchAttention against a plain reference, its masks, and the attention function that transformers calls."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.verify.model.attention.interface import Layer, tree_attention
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
GROUPS = HEADS // KV_HEADS
PARENTS = (-1, 0, 1, 1, 0, 4, 5)  # of rows; -1 = the root
TREE = "tree"
CHAIN = "chain"


def batch_of(kind: str) -> ForwardBatch:
    """Seven rows: a chain, or a tree with the parents above."""
    tokens = np.arange(len(PARENTS))
    if kind == CHAIN:
        return ForwardBatch.chain(tokens)
    ancestors = np.eye(len(PARENTS), dtype=np.bool_)
    for row, parent in enumerate(PARENTS[1:], start=1):
        ancestors[row] |= ancestors[parent]
    return ForwardBatch(tokens, ancestors.sum(1) - 1, ancestors)


def cache_of(length: int) -> TensorCache:
    cache = TensorCache(CacheShape.uniform(2, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu")), length + len(PARENTS))
    cache.tensor.normal_(generator=torch.Generator().manual_seed(length))
    cache.length = length
    return cache


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(
    layer: Layer, batch: ForwardBatch, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
) -> torch.Tensor:
    """One row and head at a time. Keys and values are [kv_heads, length + N, head_dim]."""
    out = torch.empty_like(query)
    for row in range(len(batch)):
        position = length + int(batch.depths[row])
        visible = [(at, at) for at in range(length)]
        visible += [(length + j, length + int(batch.depths[j])) for j in np.flatnonzero(batch.ancestor_mask()[row]).tolist()]
        columns = [column for column, at in visible if layer.window is None or at > position - layer.window]
        for head in range(HEADS):
            group = head // GROUPS
            scores = (keys[group, columns] @ query[head, row]) * layer.scaling
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if layer.sinks is not None:
                scores = torch.cat([scores, layer.sinks[head : head + 1]])
            weights = scores.softmax(0)[: len(columns)]
            out[head, row] = weights @ values[group, columns]
    return out


@pytest.mark.parametrize("kind", [CHAIN, TREE])
@pytest.mark.parametrize("length", [0, 1, 9])
@pytest.mark.parametrize("window", [None, 1, 3, 12])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_attention_equals_the_reference(kind: str, length: int, window: int | None, softcap: float | None, sinks: bool) -> None:
    batch, cache = batch_of(kind), cache_of(length)
    prefix = cache.tensor[1, :, :, :length].clone()
    query, key, value = (
        noise(heads, len(batch), HEAD_DIM, seed=seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    layer = Layer(1, 0.3, window, softcap, noise(HEADS, seed=4) if sinks else None)
    expected = reference(layer, batch, query, torch.cat([prefix[0], key], 1), torch.cat([prefix[1], value], 1), length)
    assert torch.allclose(TorchAttention(cache, batch).attend(layer, query, key, value), expected, atol=1e-5)
    assert torch.equal(cache.tensor[1, 0, :, length : length + len(batch)], key)
    assert torch.equal(cache.tensor[1, 1, :, length : length + len(batch)], value)


@pytest.mark.parametrize("kind", [CHAIN, TREE])
@pytest.mark.parametrize("known", [1, 4, 6])
@pytest.mark.parametrize("layer", [Layer(0, 0.3), Layer(0, 0.3, 3), Layer(0, 0.3, 3, softcap=2.0)])
def test_known_rows_are_attended_to_and_not_computed(kind: str, known: int, layer: Layer) -> None:
    batch, whole, parts = batch_of(kind), cache_of(6), cache_of(6)
    query, key, value = (
        noise(heads, len(batch), HEAD_DIM, seed=seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    expected = TorchAttention(whole, batch).attend(layer, query, key, value)
    parts.write(0, key[:, :known], value[:, :known])
    rest = (query[:, known:], key[:, known:], value[:, known:])
    found = TorchAttention(parts, replace(batch, known=known)).attend(layer, *rest)
    assert torch.allclose(found, expected[:, known:], atol=1e-5)
    assert torch.equal(parts.tensor[0], whole.tensor[0])


@pytest.mark.parametrize("kind", [CHAIN, TREE])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_layer_with_a_window_reads_no_earlier_rows(kind: str, softcap: float | None) -> None:
    """Rows before the window are not read, not even with weight zero, which NaN would show."""
    batch, cache = batch_of(kind), cache_of(40)
    cache.tensor[:, :, :, : 40 - 5 + 1] = math.nan
    query, key = noise(HEADS, len(batch), HEAD_DIM, seed=0), noise(KV_HEADS, len(batch), HEAD_DIM, seed=1)
    attention = TorchAttention(cache, batch)
    assert attention.attend(Layer(0, 0.3, 5, softcap), query, key, key).isfinite().all()
    assert attention.attend(Layer(1, 0.3, 6, softcap), query, key, key).isnan().any()


def test_a_model_that_drops_keyword_arguments_is_refused() -> None:
    module: Any = SimpleNamespace(layer_idx=0)
    rows = noise(1, HEADS, 1, HEAD_DIM, seed=0)
    with pytest.raises(ValueError, match="cannot be served"):
        tree_attention(module, rows, rows, rows, None)
