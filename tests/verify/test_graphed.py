"""The forward that is captured on a GPU: padded rows, a length and a slot that stand in the device's memory.

Without a GPU the same forward runs kernel by kernel, through Triton's interpreter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings

from drafters.draft import MAX_NODES, DraftTree
from tests.trees import trees
from verify.cache import KVCache
from verify.graphed import ROWS, GraphedForward
from verify.model import ModelRunner

PREFIX = torch.tensor([5, 9, 60, 3, 44, 7, 7, 21])


def graphed(runner: ModelRunner, model: Any = None) -> GraphedForward:
    forward = partial(runner._run, runner.model if model is None else model, keep=0)
    made = GraphedForward(forward, runner.cache_shape, runner.new_cache().positions)
    if runner.device.type == "cuda":
        made.capture(runner.new_cache())
    return made


def filled(runner: ModelRunner) -> KVCache:
    """A slot that holds the prefix."""
    cache = runner.new_cache()
    runner.forward(cache, PREFIX, logits=False)
    cache.length = len(PREFIX)
    return cache


def both(runner: ModelRunner, fast: GraphedForward, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
    """The tree's logits by the plain forward and by the fast one."""
    rows = torch.tensor([1, *tree.tokens])
    asked = (rows, torch.tensor([0, *tree.depths]), torch.from_numpy(tree.ancestors))
    return runner.forward(filled(runner), *asked), fast(filled(runner), *asked)


@settings(max_examples=5)
@given(trees(nodes=12))
def test_any_tree_has_the_same_logits(tiny_runner: ModelRunner, tree: DraftTree) -> None:
    expected, found = both(tiny_runner, graphed(tiny_runner), tree)
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("nodes", [0, 1, 2, 31, 32, MAX_NODES])
def test_every_number_of_rows_is_padded_to_the_next(tiny_runner: ModelRunner, nodes: int) -> None:
    chain = np.arange(nodes, dtype=np.int32)
    tree = DraftTree(chain, chain - 1, chain + 1, np.ones(nodes, np.float32), np.zeros(nodes, np.uint8))
    expected, found = both(tiny_runner, graphed(tiny_runner), tree)
    assert found.shape == (nodes + 1, tiny_runner.vocabulary)
    assert torch.allclose(found, expected, atol=1e-4)


def test_one_forward_serves_every_slot_and_length(tiny_runner: ModelRunner) -> None:
    fast = graphed(tiny_runner)
    token, depth = torch.tensor([11]), torch.tensor([0])
    for length in (1, 4, 8):
        slot, reference = filled(tiny_runner), filled(tiny_runner)
        for each in (slot, reference):
            each.truncate(length)
        assert torch.allclose(fast(slot, token, depth, None), tiny_runner.forward(reference, token), atol=1e-4)
        assert torch.allclose(slot.tensor[:, :, :, : length + 1], reference.tensor[:, :, :, : length + 1], atol=1e-5)


def test_torch_compile_takes_the_whole_model_in_one_piece(tiny_runner: ModelRunner) -> None:
    whole = torch.compile(tiny_runner.model, backend="eager", fullgraph=True)
    fast = graphed(tiny_runner, whole)
    token, depth = torch.tensor([11]), torch.tensor([0])
    expected = tiny_runner.forward(filled(tiny_runner), token)
    assert torch.allclose(fast(filled(tiny_runner), token, depth, None), expected, atol=1e-4)


def test_the_largest_tree_has_its_own_rows() -> None:
    assert list(ROWS) == sorted(ROWS)
    assert ROWS[-1] == MAX_NODES + 1
