"""The forward of few launches: transformers' logits, the same bits for a row in any number of rows, and what it is for."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from bench.model.fake_cuda import fake_cuda, fake_model
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.gpu import decoder
from outrider.verify.model.gpu.decoder import Decoder, angles_of, decoder_of
from outrider.verify.model.gpu.graphs import GraphedForward
from outrider.verify.model.gpu.paged_cache import PagePool
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.gpu.quantized import quantized
from outrider.verify.model.gpu.text_work import ROWS
from outrider.verify.model.load_options import Quantize
from outrider.verify.model.loading import prepare, start_model
from outrider.verify.model.quantization import layer_bits
from outrider.verify.model.torch_runner import TorchRunner
from tests.slow import mostly_slow
from tests.verify.model.families import ATTENDING, build, config_of
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.test_graphs import FORK, POSITIONS, PREFIX, Graphed, chain

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "max_window_layers": 1}
ONE = {"num_hidden_layers": 1}
FUSED = ["llama", "llama, llama3 rope", "llama, yarn", "llama, dynamic rope", "mistral", "qwen2", "qwen3"]
# The others differ from these in their angles and windows only, or have biases, as quantised weights have, too.
QUICK = ("llama, yarn", "qwen3")
CONTEXT = 64
WARNING = "the fused forward computes other logits than transformers' on this GPU"
# Of errors: the interpreter cuts numbers off where a GPU rounds them.
TOLERANCE = 1.25 if DEVICE.type == "cuda" else 1.6
# The launches of a layer, and of the embedding and the logits.
LAUNCHES, BESIDE = 7, 2
SIBLINGS = 64  # of a tree


def fused(
    name: str, bits: Quantize = "none", tapped: bool = False, sizes: dict[str, int] | None = None
) -> tuple[PreTrainedModel, Graphed, TorchRunner]:
    """A float32 model, its fused forward in bfloat16, and the runner of transformers' one."""
    reference = build(name, NAME, **SIZES | (sizes or {})).to(DEVICE)
    prepare(reference, None)
    model = deepcopy(reference).bfloat16()
    for layer, width in layer_bits(bits, model).items() if bits != "none" else ():
        blocks = quantized(model.get_submodule(layer), width, DEVICE)
        model.set_submodule(layer, blocks)
        reference.get_submodule(layer).weight = torch.nn.Parameter(blocks.blocks.weights(), requires_grad=False)
    use_kernels(model)
    runner = TorchRunner(model, started=False)
    if tapped:
        runner.tap_hidden((0, 1))
    run = decoder_of(model, POSITIONS, runner._tap)
    assert isinstance(run, Decoder)
    return reference, Graphed(runner, run=run, capture=False), runner


def siblings(tokens: NDArray[np.int64]) -> ForwardBatch:
    return ForwardBatch(tokens, np.zeros(len(tokens), np.int64), np.eye(len(tokens), dtype=np.bool_))


def read(forward: Graphed | TorchRunner, batch: ForwardBatch) -> torch.Tensor:
    if isinstance(forward, Graphed):
        cache = forward.filled()[1]
        return forward(Segment(cache, batch)).float().clone()
    cache = forward.new_cache()
    forward.forward(cache, ForwardBatch.chain(PREFIX), logits=False)
    cache.commit(list(range(len(PREFIX))))
    found: torch.Tensor = forward.forward(cache, batch).float()
    return found.clone()


@pytest.mark.parametrize("name", mostly_slow(FUSED, *QUICK))
@pytest.mark.parametrize("batch", [pytest.param(chain(5), marks=pytest.mark.slow), FORK])
def test_logits_are_as_near_to_the_weights_as_transformers(name: str, batch: ForwardBatch) -> None:
    reference, graphs, runner = fused(name)
    exact = read(TorchRunner(reference, started=False), batch)
    found, usual = (float((read(each, batch) - exact).norm()) for each in (graphs, runner))
    assert found <= TOLERANCE * usual


@pytest.mark.parametrize("bits", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_quantised_weights(bits: Quantize) -> None:
    reference, graphs, _ = fused("qwen2", bits, sizes=ONE)
    exact = read(TorchRunner(reference, started=False), chain(5))
    assert float((read(graphs, chain(5)) - exact).norm() / exact.norm()) < 0.08 * TOLERANCE


@pytest.mark.parametrize("counts", [(1, 17), pytest.param(ROWS, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("sizes", [ONE, pytest.param({"hidden_size": 128, "intermediate_size": 320}, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_a_row_has_the_same_bits_in_any_number_of_rows(sizes: dict[str, int], counts: tuple[int, ...]) -> None:
    """Of siblings of up to four streams, which attend to the prefix and themselves."""
    _, graphs, _ = fused("qwen3", sizes=sizes)
    tokens, caches = np.arange(counts[-1]) % 90 + 3, [graphs.filled()[1] for _ in range(0, counts[-1], SIBLINGS)]
    batches = [siblings(tokens[first : first + SIBLINGS]) for first in range(0, counts[-1], SIBLINGS)]

    def rows(count: int) -> torch.Tensor:
        last = siblings(tokens[count - (count - 1) % SIBLINGS - 1 : count])
        segments = [*batches[: (count - 1) // SIBLINGS], last]
        return graphs(*map(Segment, caches, segments)).float().clone()

    *found, whole = map(rows, counts)
    assert all(torch.equal(logits, whole[: len(logits)]) for logits in found)


def test_hidden_states_are_those_of_the_layers() -> None:
    _, graphs, runner = fused("llama", tapped=True)
    read(graphs, chain(3))
    assert runner._tap is not None
    found = runner._tap.states[:3].float().clone()
    read(runner, chain(3))
    expected = runner._tap.states.float()
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("name", sorted({*ATTENDING} - {*FUSED}))
def test_other_decoders_are_left_to_transformers(name: str) -> None:
    model = build(name, NAME).bfloat16()
    use_kernels(model)
    assert decoder_of(model, POSITIONS) is None


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_launches_of_a_layer(name: str) -> None:
    with fake_cuda() as device:
        runner = TorchRunner(fake_model(config_of(name, NAME, **SIZES)), POSITIONS, started=False)
        run = decoder_of(runner.model, POSITIONS)
        assert run is not None
        forward = GraphedForward(run, PagePool(runner.cache_shape, 4), POSITIONS, 2)
        device.launches = 0
        device.operations.clear()
        forward._run(16)
        kernels = device.launches + 2 * device.operations["outrider.tree_attention.default"]
    assert kernels == LAUNCHES * 2 + BESIDE


@pytest.mark.slow
def test_a_forward_that_a_gpu_computes_wrongly_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    model = build("qwen3", NAME, **SIZES).to(DEVICE).bfloat16()
    use_kernels(model)
    for angles, is_fused in ((angles_of, True), (lambda *given: angles_of(*given).roll(1, 0), False)):
        monkeypatch.setattr(decoder, "angles_of", angles)
        runner = TorchRunner(model, CONTEXT, compile="off", started=False)
        start_model(runner, "model", CONTEXT)
        assert runner.is_fused == is_fused
        assert [message.partition(",")[0] for message in caplog.messages] == [WARNING] * (not is_fused)
