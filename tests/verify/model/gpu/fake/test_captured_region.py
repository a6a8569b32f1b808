"""What CUDA would capture of each family of models: no transfer, no wait for the device and no memory of the host."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from bench.model import fake_cuda as fake
from bench.model.fake_cuda import Device, fake_cuda, fake_model
from outrider.verify.errors import ModelError
from outrider.verify.heads.loading import layer_config
from outrider.verify.heads.model import HeadModel
from outrider.verify.heads.networks import EagleHead
from outrider.verify.model import quantization
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.gpu import experts
from outrider.verify.model.gpu.decoder import TensorParallel, decoder_of
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.graphs import GraphedForward
from outrider.verify.model.gpu.paged_cache import PagePool
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.gpu.ranks import split_model
from outrider.verify.model.load_options import Quantize
from outrider.verify.model.quantization import quantize_model
from outrider.verify.model.sizes import packed_layers
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model import families
from tests.verify.model.families import SERVED

CONTEXT = 64
ROWS = (1, 72)
ON_ONE_DEVICE = {"gemma4"}  # layers read the keys of others
DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))


def captured(name: str, devices: Sequence[torch.device], quantize: Quantize = "none", **sizes: Any) -> Device:
    """What is captured of a small model of the family over these devices, for each of ROWS."""
    with fake_cuda() as device:
        model = fake_model(families.config_of(name, NAME, **sizes), devices)
        quantize_model(model, quantize, Placement(model, devices))
        assert quantize == "none" or not any(weight.dim() == 3 for weight in model.parameters())  # experts have few bits, too
        assert bool(packed_layers(model)) == (quantize != "none")
        assert all(layer.weight.device in devices for layer in packed_layers(model))
        runner = TorchRunner(model, CONTEXT, compile="off", started=False)
        pool = PagePool(runner.cache_shape, 4)
        groups = runner._attention_probe.groups
        forward = GraphedForward(
            partial(runner._run, keep=0), pool, CONTEXT, groups, tap=runner._tap, crossings=runner._crossings
        )
        for count in ROWS:
            forward._run(count)
            forward.capture_rows(count, device.capture)
    return device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [(name, count) for name in SERVED for count in (1, 2)[: 2 - (name in ON_ONE_DEVICE)]]
)
def test_nothing_that_cuda_would_refuse_is_captured(name: str, count: int) -> None:
    assert not captured(name, DEVICES[:count]).forbidden


@pytest.mark.parametrize(
    ("name", "quantize", "count"),
    [("llama", "int4", 2), ("qwen3_moe", "int4", 1), ("gpt_oss", "int8", 2)],
)
def test_nor_with_quantised_weights(name: str, quantize: Quantize, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64} | ({"intermediate_size": 96, "tie_word_embeddings": True} if name == "llama" else {})
    monkeypatch.setattr(quantization, "is_plain", lambda module: type(module).__name__ == "Linear")  # whose weights are fake
    assert not captured(name, DEVICES[:count], quantize, **sizes).forbidden


def test_a_split_model_is_one_graph_on_each_gpu() -> None:
    """GPUs wait for each other inside."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 2}
    captured = list[torch.device]()

    def capture(on: torch.device) -> Any:
        captured.append(on)
        return device.capture(on)

    with fake_cuda() as device:
        model = fake_model(families.config_of("llama", NAME, **sizes), DEVICES[:1])
        split_model(model, DEVICES)
        runner = TorchRunner(model, CONTEXT, compile="off", started=False)
        run = decoder_of(model, CONTEXT, None, runner._crossings)
        assert isinstance(run, TensorParallel)
        forward = GraphedForward(run, PagePool(runner.cache_shape, 4), CONTEXT, 2, crossings=runner._crossings)
        forward.capture_rows(16, capture)
    assert captured == [*DEVICES] and not device.forbidden


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_ONE_DEVICE))
def test_other_families_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"set model\.device to one device"):
        captured(name, DEVICES)


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_nor_of_a_draft_head(rope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its rotary angles depend on the forward's length in transformers."""
    with fake_cuda() as device:
        config = families.config_of("llama", NAME)
        target = TorchRunner(fake_model(config, DEVICES[:1]), CONTEXT, compile="off", started=False)
        with DEVICES[0]:
            parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
            network = EagleHead(layer_config(config.to_dict() | {"rope_parameters": parameters}, {}))
        monkeypatch.setattr(network, "to", lambda _: network)  # is there, and PyTorch cannot move what is fake
        head = HeadModel(network, target, pack=False)
        head.pages = 4
        monkeypatch.setattr(GraphedForward, "capture", lambda graphed: graphed.capture_rows(ROWS[1], device.capture))
        head.start(CONTEXT)
    assert head._graphed is not None and head._graphed._graphs and not device.forbidden


@pytest.mark.parametrize(
    ("capability", "is_ours", "is_captured"),
    [((8, 9), False, False), ((9, 0), False, True), ((10, 3), False, True), ((12, 0), False, False), ((12, 0), True, True)],
)
def test_experts_are_captured_where_their_products_need_no_host(
    capability: tuple[int, int], is_ours: bool, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_ours:  # as those of families whose gates our kernels do not compute
        monkeypatch.setattr(experts, "way_of", lambda _: None)
    starts: list[GraphedForward] = []
    monkeypatch.setattr(GraphedForward, "capture", lambda graphed: starts.append(graphed))
    monkeypatch.setattr(fake, "CAPABILITY", capability)
    with fake_cuda():
        model = fake_model(families.config_of("qwen3_moe", NAME))
        runner = TorchRunner(model, CONTEXT, compile="off", started=False)
        runner.pages = 4
        runner.start(CONTEXT)
    assert bool(starts) == is_captured


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_mixture_launches_three_operations(name: str) -> None:
    """The router's product, the choice, and the experts; without a copy between them."""
    with fake_cuda() as device:
        model = fake_model(families.config_of(name, NAME))
        use_kernels(model)
        mixture = model.model.layers[0].mlp
        rows = torch.zeros(1, 64, 32, dtype=torch.bfloat16, device=DEVICES[0])
        before = device.launches
        mixture(rows)
    assert device.launches - before == 3, device.operations
