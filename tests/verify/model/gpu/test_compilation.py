"""Layers are compiled once for all of them, by settings that the installed version of PyTorch has."""

import logging
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.fx.experimental.symbolic_shapes import free_symbols

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.gpu.compilation import CompileError, compiled_layers
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.test_graphs import Graphed


@pytest.mark.slow
def test_layers_are_compiled_once_for_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    """Code compiled for a few layers and numbers of rows serves all, with unchanged results. All other sizes are constants."""
    caplog.set_level(logging.WARNING, "torch.__trace")  # verbose
    runner = TorchRunner(build("llama", NAME).to(DEVICE), started=False)
    compiled: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.append(graph)
        values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op.startswith("call")]
        sizes = {symbol for value in values if isinstance(value, torch.Tensor) for symbol in free_symbols(value.shape)}
        assert len(sizes) <= 1  # the number of rows
        return graph

    graphs = Graphed(runner, capture=False)
    before = [module.forward for module in runner.model.modules()]
    for size in (64, 4, 2, 1):  # attention has larger blocks for the first one, which is also the size of a page
        batch = ForwardBatch.chain(torch.arange(3, 3 + size))
        reference, cache = graphs.filled()
        expected = runner.forward(reference, batch)
        with compiled_layers(runner.model, count):
            assert torch.allclose(graphs(Segment(cache, batch)), expected, atol=1e-4)
    # The layers for any number of rows, and for one; and the last norm for any number, and for one.
    assert len(compiled) == 2 + 2
    assert [module.forward for module in runner.model.modules()] == before


def test_a_failed_compilation_is_reported() -> None:
    runner = TorchRunner(build("llama", NAME).to(DEVICE), started=False)
    graphs = Graphed(runner, capture=False)
    _, cache = graphs.filled()

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    with pytest.raises(CompileError, match="no"), compiled_layers(runner.model, refuse):
        graphs(Segment(cache, ForwardBatch.chain(torch.tensor([11]))))
