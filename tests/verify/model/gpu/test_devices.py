"""A model over two devices: which layers are where, the logits of one device, and a step that is captured in stages."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME, Layer, ShapeProbe
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.gpu.devices import Crossings, Placement, decoder_layers, split
from outrider.verify.model.gpu.graphs import GraphedForward
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.gpu.triton_products import counters_of, use_kernel
from outrider.verify.model.recurrent import states
from outrider.verify.model.recurrent.rows import TensorStates
from outrider.verify.model.torch_runner import TorchRunner
from tests.slow import mostly_slow
from tests.verify.model.families import build, random_model
from tests.verify.model.gpu.emulated_devices import Devices
from tests.verify.model.gpu.test_graphs import POSITIONS, Graphed

FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)
CONTEXT = 32
COPIES = 5  # of a forward: hidden states, positions, both parts of rotary embeddings, and the hidden states back


# The interpreter takes a second for a layer of a few rows. Of Kimi Linear, the first device has no layer with attention.
KIMI: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
KIMI |= {"linear_num_heads": 1, "mlp_layer_types": ["sparse", "dense", "dense"]}
SIZES = {"llama": {"num_hidden_layers": 2}, "kimi_linear": KIMI}


def placed(name: str, *devices: torch.device) -> TorchRunner:
    torch.manual_seed(1)
    model = build(name, NAME, **SIZES.get(name, {}))
    Placement(model, devices).move()
    runner = TorchRunner(model, CONTEXT, compile="off", started=False)
    runner.pages = 4
    runner.start(CONTEXT)
    return runner


def answers(runner: TorchRunner, forks: bool = True) -> list[torch.Tensor]:
    """Logits of parts of a prompt: at first, after a commit, after a swap, and in a fork."""
    cache, fork = runner.new_cache(), runner.new_cache()

    def read(*tokens: int) -> torch.Tensor:
        found: torch.Tensor = runner.forward(cache, ForwardBatch.chain(tokens), logits=False)
        return found.clone()

    found = [read(*range(3, 12))]
    cache.commit([0, 2, 3, 7])
    found.append(read(5, 6))
    if forks:
        fork.fork(cache, 3)
        cache.fork(cache.swap_out(), 4)
        found.append(read(5, 6))
        cache.fork(fork, 3)
        found.append(read(7))
    return found


@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "kimi_linear", "gpt2", "gemma2", "phi3", "qwen3_5", "lfm2", "mamba2"], "llama", "kimi_linear")
)
def test_two_devices_give_the_logits_of_one(devices: Devices, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 2)
    expected = answers(placed(name, FIRST))
    assert devices.copies == 0
    runner = placed(name, FIRST, SECOND)
    assert [part.device for part in runner.cache_shape.parts] == [FIRST, SECOND]
    if name == "kimi_linear":
        assert not runner.cache_shape.parts[0].layers
    devices.copies = 0
    found = answers(runner)
    if name == "llama":
        assert devices.copies == COPIES * len(found)
    for logits, wanted in zip(found, expected, strict=True):
        assert logits.device == FIRST
        assert torch.equal(logits.cpu(), wanted.cpu())


def test_keys_of_another_device_are_refused(devices: Devices) -> None:
    there = torch.zeros(1, 1, 4, device=SECOND)
    with pytest.raises(ValueError, match=r"keys of cpu:1; set model\.device to one device$"):
        ShapeProbe().attend(Layer(1, 1.0), torch.zeros(1, 1, 4, device=FIRST), there, there)


def test_more_devices_than_layers_are_refused() -> None:
    model = build("llama", NAME)
    devices = [torch.device("cpu", index) for index in range(len(decoder_layers(model)) + 1)]
    with pytest.raises(
        ModelError, match=r"^The model has \d layers, but model.device names \d devices; name as many at most\.$"
    ):
        Placement(model, devices)


def test_parts_have_about_the_same_size() -> None:
    assert split([0, *[10] * 8], 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert split([20, *[10] * 8], 2) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert split([500, 10, 10, 10], 2) == [0, 1, 1]


def test_a_tensor_on_another_device_is_noticed(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests rely on."""
    monkeypatch.setattr(Crossings, "bring", lambda _, value, device: value)
    with pytest.raises(ModelError, match=r"forward fails .* on the same device, but found .*cpu:0.*cpu:1"):
        placed("llama", FIRST, SECOND)


@pytest.mark.parametrize("homes", [(FIRST,), (FIRST, SECOND)])
def test_a_snapshot_crosses_in_one_copy_of_each_device(devices: Devices, homes: tuple[torch.device, ...]) -> None:
    shape = states.RecurrentShape(2, 3, 5, 2, 1, 4, 6, 1, torch.bfloat16, FIRST, homes if len(homes) > 1 else ())
    source, target = TensorStates(shape), TensorStates(shape)
    matrices, windows = torch.randn(2, 1, 4, 6), torch.randn(2, 3, 5).bfloat16()
    for layer in range(2):
        source.matrices[layer], source.inputs[layer, :3] = matrices[layer], windows[layer]
    source.length = 9
    [snapshot] = source.states(9, 9)
    devices.host_copies = 0
    found = snapshot.on_host()
    assert devices.host_copies == len(homes)
    assert torch.equal(found.matrices, matrices) and torch.equal(found.windows, windows)
    target.restore([found], 9)
    assert devices.host_copies == 2 * len(homes)
    assert all(torch.equal(own.cpu(), matrix) for own, matrix in zip(target.matrices, matrices, strict=True))
    assert all(torch.equal(own.cpu(), rows) for own, rows in zip(target.inputs[:, :3], windows, strict=True))


def test_a_replay_of_a_captured_step_computes_other_rows(tiny_config: LlamaConfig, devices: Devices) -> None:
    """And copies what crosses."""
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


def test_a_replay_clears_what_an_interrupted_product_has_counted(devices: Devices) -> None:
    """Otherwise another program would add the parts of all splits, before they are there."""
    torch.manual_seed(1)
    shape = CacheShape.uniform(layers=1, kv_heads=1, head_dim=16, dtype=torch.bfloat16, device=FIRST)
    layer = torch.nn.Linear(512, 64, False, FIRST, torch.bfloat16)
    table = torch.randn(9, 512, dtype=torch.bfloat16, device=FIRST)
    use_kernel([layer])
    crossings = Crossings(layer, FIRST)
    graphs = GraphedForward(lambda tokens, *_, **__: layer(table[tokens]), PagePool(shape, 1), 16, 1, (2,), None, crossings)
    graphs.counters = counters_of(layer)
    graphs.capture_rows(2, devices.capture)
    cache = PagedCache(graphs._pool, 16)
    cache.reserve(2)
    for token in (3, 5):
        graphs.counters[0].fill_(1)
        found = graphs([Segment(cache, ForwardBatch.chain([token, token + 1]))]).float()
        assert torch.allclose(found, table[token : token + 2].float() @ layer.weight.float().T, atol=0.1)
        assert not graphs.counters[0].cpu().any()
