"""A forward over two devices, captured in stages: a replay computes new rows, and copies what crosses."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.paged_cache import PagedCache
from outrider.verify.model.segment import Segment
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import random_model
from tests.verify.model.gpu.emulated_devices import emulated_devices
from tests.verify.model.gpu.test_devices import FIRST, SECOND
from tests.verify.model.gpu.test_graphs import POSITIONS, Graphed


def test_a_replay_computes_other_rows(tiny_config: LlamaConfig) -> None:
    with emulated_devices() as devices:
        torch.manual_seed(1)
        model = random_model(tiny_config, NAME)
        Placement(model, (FIRST, SECOND)).move()
        runner = TorchRunner(model, started=False)
        runner.tap_hidden((0, 1))
        graphs = Graphed(runner)
        graphs.forward.capture_rows(2, devices.capture)
        assert len(graphs.forward._graphs[2]._stages) > 3
        cache = PagedCache(graphs.pool, POSITIONS)
        for length, tokens in ((0, [5, 9]), (1, [7, 60])):
            cache.length = length
            batch = ForwardBatch.chain(torch.tensor(tokens))
            found = graphs(Segment(cache, batch)).cpu()
            assert cache.hidden is not None
            states = cache.hidden.read(length, length + 2).cpu()
            assert torch.allclose(found, runner.forward(cache, batch).cpu(), atol=1e-4)
            assert torch.allclose(states, cache.hidden.read(length, length + 2).cpu(), atol=1e-4)
