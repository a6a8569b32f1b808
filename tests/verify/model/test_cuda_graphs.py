"""The forward that is captured on a GPU: padded rows, a length and a slot that stand in the device's memory.

Without a GPU the same forward runs kernel by kernel, through Triton's interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings

from drafters.interface import MAX_NODES, DraftTree
from tests.trees import trees
from tests.verify.model.test_architectures import make
from verify.model import triton_attention as tree_kernel
from verify.model.attention import NAME
from verify.model.cache import KVCache
from verify.model.cuda_graphs import ROWS, CompileError, GraphedForward, compiled_layers
from verify.model.runner import ModelRunner

PREFIX = torch.tensor([5, 9, 60, 3, 44, 7, 7, 21])


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """A prefix of a few tokens in few parts, for the interpreter's sake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_kernel, "PROGRAMS", 8)
        yield


def graphed(runner: ModelRunner) -> GraphedForward:
    forward = partial(runner._run, runner.model, keep=0)
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


def test_layers_are_compiled_once_for_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    """Any layer and number of rows runs what was made for few, and says what the layers themselves say."""
    caplog.set_level(logging.WARNING, "torch.__trace")  # it says a lot
    runner = ModelRunner(make("llama", NAME))
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    fast = graphed(runner)
    before = [each.forward for each in runner.model.modules()]
    for size in (4, 2, 1):
        tokens = torch.arange(3, 3 + size)
        depths = torch.arange(size)
        chain = torch.ones(size, size, dtype=torch.bool).tril()
        expected, slot = runner.forward(filled(runner), tokens, depths, chain), filled(runner)
        with compiled_layers(runner.model, count):
            assert torch.allclose(fast(slot, tokens, depths, chain), expected, atol=1e-4)
    assert len(graphs) == 4  # the first layer and the others, any number of rows, one row
    assert [each.forward for each in runner.model.modules()] == before


def test_a_model_that_does_not_compile_says_so() -> None:
    runner = ModelRunner(make("llama", NAME))
    fast, slot = graphed(runner), filled(runner)

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    with pytest.raises(CompileError, match="no"), compiled_layers(runner.model, refuse):
        fast(slot, torch.tensor([11]), torch.tensor([0]), None)


def test_the_largest_tree_has_its_own_rows() -> None:
    assert list(ROWS) == sorted(ROWS)
    assert ROWS[-1] == MAX_NODES + 1
