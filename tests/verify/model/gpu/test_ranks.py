"""A model whose layers are split over emulated GPUs: it has the bits of one, in whatever order the ranks run."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import Segment
from outrider.verify.model.gpu import triton_products
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.exchange import add_parts, exchanges, publish
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.gpu.quantized import quantized
from outrider.verify.model.gpu.ranks import borders, check_ranks, ranges, split, split_model
from outrider.verify.model.gpu.triton_products import linear_residual, split_of
from outrider.verify.model.load_options import Quantize
from outrider.verify.model.quantization import layer_bits
from outrider.verify.model.self_check import check_model
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build, config_of
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.emulated_devices import Devices
from tests.verify.model.gpu.test_devices import FIRST, SECOND, answers
from tests.verify.model.gpu.test_graphs import FORK, chain
from tests.verify.model.gpu.test_triton_products import computed, layer

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")
# Sums of each layer have two parts.
SIZES = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_window_layers": 1}
CONTEXT = 32


def model_over(name: str, quantize: Quantize, *devices: torch.device, layers: int = 1) -> PreTrainedModel:
    torch.manual_seed(1)
    model: PreTrainedModel = build(name, NAME, **SIZES, num_hidden_layers=layers).bfloat16()
    for place, bits in layer_bits(quantize, model).items() if quantize != "none" else ():
        model.set_submodule(place, quantized(model.get_submodule(place), bits, devices[0]))
    if len(devices) > 1:
        split_model(model, devices)
    else:
        Placement(model, devices).move()
        use_kernels(model)
    return model


def over(name: str, quantize: Quantize, *devices: torch.device, layers: int = 1) -> TorchRunner:
    runner = TorchRunner(model_over(name, quantize, *devices, layers=layers), CONTEXT, compile="off", started=False)
    runner.pages = 4
    runner.start(CONTEXT, (16,))
    return runner


@pytest.mark.parametrize(
    ("name", "quantize", "layers"), [pytest.param("qwen2", "none", 2, marks=pytest.mark.slow), ("qwen3", "int4", 1)]
)
def test_two_gpus_give_the_bits_of_one(devices: Devices, name: str, quantize: Quantize, layers: int) -> None:
    expected = answers(over(name, quantize, FIRST, layers=layers), forks=False)
    runner = over(name, quantize, FIRST, SECOND, layers=layers)
    assert runner.is_fused and [part.device for part in runner.cache_shape.parts] == [FIRST, SECOND]
    for logits, wanted in zip(answers(runner, forks=False), expected, strict=True):
        assert logits.device == FIRST
        assert torch.equal(logits.cpu(), wanted.cpu())


def test_a_replay_computes_other_rows(devices: Devices) -> None:
    """Captured in turns, since nothing waits here."""
    one, two = over("llama", "none", FIRST), over("llama", "none", FIRST, SECOND)
    assert one.graphs is not None and two.graphs is not None
    two.graphs.capture_rows(16, devices.capture)
    caches = one.new_cache(), two.new_cache()
    for batch in (chain(3), FORK):
        for cache in caches:
            cache.reserve(len(batch))
        expected, found = (
            each([Segment(cache, batch)]).cpu() for each, cache in zip((one.graphs, two.graphs), caches, strict=True)
        )
        assert torch.equal(found, expected)
        for cache in caches:
            cache.commit([0, 2])


@pytest.mark.slow
def test_a_start_compares_it_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    check_model(over("qwen3", "none", DEVICE, DEVICE, layers=2), "model")


@pytest.mark.parametrize(
    ("bits", "ranks", "inputs", "counts"), [(16, 2, 896, (1, 20, 72)), (16, 4, 512, (1, 20)), (4, 2, 512, (1, 20))]
)
def test_sums_of_ranks_are_those_of_one(bits: int, ranks: int, inputs: int, counts: tuple[int, ...]) -> None:
    """Also if the last rank has fewer inputs."""
    holder, whole = torch.nn.Module(), cancelling(inputs, 128)
    holder.o = quantized(copied(whole), bits, DEVICE) if bits < 16 else copied(whole)
    split(holder, "o", ranges(borders(inputs, 128, ranks)), [DEVICE] * ranks, True)
    parts: Any = holder.o
    one, room = computed(whole, bits), parts.splits * counts[-1] * 128
    shared = exchanges([DEVICE] * ranks, room, torch.empty(1, device=DEVICE))
    for count in counts:
        rows, residual = cancelled(count, inputs), torch.zeros(count, 128, device=DEVICE).bfloat16()
        gain = torch.randn(128, device=DEVICE).bfloat16()
        expected = linear_residual(rows, *one.weights, residual, gain)
        weights = [parts.weights(rank) for rank in range(ranks)]
        for rank, [own] in enumerate(parts.places):
            publish(rows[:, own.start : own.stop], *weights[rank], *shared[rank], parts.splits // ranks * rank, room)
        for rank in range(ranks):
            found = add_parts(residual, gain, weights[rank].bias, *shared[rank], parts.splits, room)
            assert all(map(torch.equal, found, expected))
        assert expected[0].any()


def test_outputs_of_ranks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a layer of so few outputs cuts its inputs into more parts."""
    monkeypatch.setattr(triton_products, "PROGRAMS", 2)
    holder, whole, rows = torch.nn.Module(), cancelling(256, 256), cancelled(20, 256)
    assert split_of(256, 128) < split_of(256, 256)
    holder.qkv = copied(whole)
    split(holder, "qkv", [[range(64), range(128, 192)], [range(64, 128), range(192, 256)]], [DEVICE] * 2, False)
    assert torch.equal(holder.qkv(rows), computed(whole)(rows))


def cancelling(inputs: int, outputs: int) -> torch.nn.Linear:
    """Half of the inputs cancel the others, so another order of the sums shows."""
    found, half = layer(inputs, outputs, bias=True), inputs // 2
    found.weight[:, half:] = -found.weight[:, :half].flip(1)
    found.bias.zero_()
    return found


def cancelled(count: int, inputs: int) -> torch.Tensor:
    half = torch.randn(count, inputs // 2, device=DEVICE).bfloat16()
    return torch.cat([half, half.flip(1)], 1)


def copied(linear: torch.nn.Linear) -> torch.nn.Linear:
    found = layer(linear.in_features, linear.out_features, linear.bias is not None)
    found.load_state_dict(linear.state_dict())
    return found


def refusal(config: LlamaConfig, devices: int = 2, dtype: torch.dtype = torch.bfloat16) -> str:
    with pytest.raises(ModelError) as caught:
        check_ranks(config, dtype, [torch.device("cpu", number) for number in range(devices)])
    return str(caught.value)


def test_models_that_cannot_be_split_are_refused() -> None:
    check_ranks(config_of("llama", NAME, **SIZES), torch.bfloat16, [FIRST, SECOND])
    others = "Only layers of Llama's kind in bfloat16 or float16 can be split over GPUs; "
    for found in (refusal(config_of("gemma2", NAME)), refusal(config_of("llama", NAME, **SIZES), dtype=torch.float32)):
        assert found == others + "write commas between the devices in model.device."
    one_head = config_of("llama", NAME, **SIZES | {"num_key_value_heads": 1})
    assert refusal(one_head).startswith("1 key heads cannot be divided among 2 GPUs; ")
    narrow = config_of("llama", NAME, **SIZES | {"intermediate_size": 96})
    assert refusal(narrow).startswith("Sums of 96 products, which are cut into 1 parts, cannot be divided among 2 GPUs; ")
