"""Models with recurrent layers as on a GPU: logits of the plain forward, captured steps, lossless drafts, sessions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.paged_cache import PagedCache
from outrider.verify.model.recurrent import states
from outrider.verify.model.torch_runner import TorchRunner
from tests.decoding import check_sessions
from tests.verify.model.families import DELTA, SIZES, config_of, random_model
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.emulated_devices import emulated_devices
from tests.verify.model.gpu.test_devices import FIRST
from tests.verify.model.gpu.test_graphs import POSITIONS, Graphed

CONTEXT = 300


class Paged(TorchRunner):
    """A runner as on a GPU, without captured graphs."""

    in_pages = True


def small() -> Any:
    """Two layers: the interpreter takes a second for a layer of a few rows."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return random_model(config_of("qwen3_5", NAME, **layers), NAME).to(DEVICE)


def mixed_steps(forward: Callable[[list[Segment]], torch.Tensor], caches: list[TensorCache]) -> torch.Tensor:
    """Logits of a tree of one stream and a token of another, twice: the streams change places after a commit."""
    ancestors = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    tree = ForwardBatch(np.array([5, 6, 7]), np.array([0, 1, 1]), ancestors)
    found = []
    for first, second in (caches, caches[::-1]):
        found.append(forward([Segment(first, tree), Segment(second, ForwardBatch.chain(torch.tensor([9])))]).cpu())
        first.commit([0, 2])
        second.commit([0])
    return torch.cat(found)


def test_a_replay_computes_other_streams() -> None:
    """A captured step reads where the states of its streams are, and which rows their trees have."""
    few = {"linear_num_value_heads": 1, "linear_num_key_heads": 1, "layer_types": ["linear_attention", "full_attention"]}
    config = transformers.Qwen3_5TextConfig(**(SIZES | DELTA | few | {"num_hidden_layers": 2}), attn_implementation=NAME)
    reference = TorchRunner(random_model(config, NAME), started=False)
    expected = mixed_steps(lambda segments: torch.cat(reference.forward_all(segments)), [reference.new_cache() for _ in "ab"])
    with emulated_devices() as devices:
        model = random_model(config, NAME)
        Placement(model, (FIRST,)).move()
        graphs = Graphed(TorchRunner(model, started=False))
        graphs.forward.capture_rows(4, devices.capture)
        found = mixed_steps(lambda segments: graphs(*segments), [PagedCache(graphs.pool, POSITIONS) for _ in "ab"])
        assert graphs.forward._graphs.keys() == {4}
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_sessions_are_reused_forked_rewound_and_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
    runner = Paged(small(), CONTEXT, compile="off", started=False)
    runner.pages = 24
    runner.start(CONTEXT)
    reference = TorchRunner(small(), CONTEXT, started=False)  # without a backend; its caches are contiguous
    for _ in check_sessions(runner, 3, share=0.5, added=(1, 3, 100), tokens=4, reference=reference):
        pass
