"""The forward captured on a GPU: padded rows, with length and slot in device memory.

Without a GPU, the same forward runs uncaptured through Triton's interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings

from drafters.interface import MAX_NODES, DraftTree, Source, chain
from tests.trees import trees
from tests.verify.model.test_architectures import make
from verify.model.attention import NAME
from verify.model.batch import ForwardBatch
from verify.model.cache import KVCache
from verify.model.gpu import triton_attention as tree_kernel
from verify.model.gpu.graphs import ROWS, CompileError, GraphedForward, compiled_layers
from verify.model.runner import ModelRunner
from verify.model.segment import Segment

PREFIX = torch.tensor([5, 9, 60, 3, 44, 7, 7, 21])


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Few splits of a short prefix, to be fast in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_kernel, "PROGRAMS", 8)
        yield


def graphed(runner: ModelRunner) -> GraphedForward:
    forward = GraphedForward(partial(runner._run, keep=0), runner.cache_shape, runner.new_cache().positions)
    if runner.device.type == "cuda":
        forward.capture(runner.new_cache())
    return forward


def filled(runner: ModelRunner) -> KVCache:
    """A slot that holds the prefix."""
    cache = runner.new_cache()
    runner.forward(cache, ForwardBatch.chain(PREFIX), logits=False)
    cache.length = len(PREFIX)
    return cache


def both(runner: ModelRunner, graphs: GraphedForward, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch's logits by the plain forward and by the graphed one."""
    return runner.forward(filled(runner), batch), graphs([Segment(filled(runner), batch)])


@settings(max_examples=5)
@given(trees(nodes=12))
def test_any_tree_has_the_same_logits(tiny_runner: ModelRunner, tree: DraftTree) -> None:
    expected, found = both(tiny_runner, graphed(tiny_runner), ForwardBatch.tree(1, tree))
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("nodes", [0, 1, 2, *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in (31, 32, MAX_NODES))])
def test_rows_are_padded_to_the_next_captured_number(tiny_runner: ModelRunner, nodes: int) -> None:
    tree = chain(np.arange(nodes, dtype=np.int32), np.ones(nodes, np.float32), Source.NONE)
    expected, found = both(tiny_runner, graphed(tiny_runner), ForwardBatch.tree(1, tree))
    assert found.shape == (nodes + 1, tiny_runner.vocabulary)
    assert torch.allclose(found, expected, atol=1e-4)


def test_one_forward_serves_every_slot_and_length(tiny_runner: ModelRunner) -> None:
    graphs = graphed(tiny_runner)
    batch = ForwardBatch.chain(torch.tensor([11]))
    for length in (1, 4, 8):
        slot, reference = filled(tiny_runner), filled(tiny_runner)
        for each in (slot, reference):
            each.truncate(length)
        assert torch.allclose(graphs([Segment(slot, batch)]), tiny_runner.forward(reference, batch), atol=1e-4)
        assert torch.allclose(slot.tensor[:, :, :, : length + 1], reference.tensor[:, :, :, : length + 1], atol=1e-5)


def test_a_chain_needs_no_ancestors(tiny_runner: ModelRunner) -> None:
    """Rows without an ancestor matrix are causal, as in a scored prompt chunk."""
    expected, found = both(tiny_runner, graphed(tiny_runner), ForwardBatch.chain(torch.arange(3, 12)))
    assert torch.allclose(found, expected, atol=1e-4)


def test_known_rows_have_no_logits(tiny_runner: ModelRunner) -> None:
    graphs, slot = graphed(tiny_runner), filled(tiny_runner)
    batch = ForwardBatch.chain(torch.arange(3, 9))
    expected = graphs([Segment(slot, batch)])[4:].clone()
    found = graphs([Segment(slot, replace(batch, known=4))])
    assert found.shape == (2, tiny_runner.vocabulary)
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_layers_are_compiled_once_for_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    """Code compiled for a few layers and numbers of rows serves all, with unchanged results."""
    caplog.set_level(logging.WARNING, "torch.__trace")  # verbose
    runner = ModelRunner(make("llama", NAME))
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    forward = graphed(runner)
    before = [module.forward for module in runner.model.modules()]
    for size in (4, 2, 1):
        batch = ForwardBatch.chain(torch.arange(3, 3 + size))
        expected, slot = runner.forward(filled(runner), batch), filled(runner)
        with compiled_layers(runner.model, count):
            assert torch.allclose(forward([Segment(slot, batch)]), expected, atol=1e-4)
    assert len(graphs) == 4  # the first layer and the others, any number of rows, one row
    assert [module.forward for module in runner.model.modules()] == before


def test_a_failed_compilation_is_reported() -> None:
    runner = ModelRunner(make("llama", NAME))
    graphs, slot = graphed(runner), filled(runner)

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    with pytest.raises(CompileError, match="no"), compiled_layers(runner.model, refuse):
        graphs([Segment(slot, ForwardBatch.chain(torch.tensor([11])))])


def test_the_largest_tree_has_its_own_graph() -> None:
    assert list(ROWS) == sorted(ROWS)
    assert ROWS[-1] == MAX_NODES + 1
