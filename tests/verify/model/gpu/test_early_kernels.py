"""Kernels that are compiled while a model loads: those of a sketch are the model's, and a failure changes nothing."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import enumerate as threads
from typing import Any

import pytest
import torch
import triton.language as tl
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from triton.runtime.interpreter import InterpretedFunction

from outrider.verify.checkpoint import Location, locate
from outrider.verify.model import file_model
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cpu.native.loading import read
from outrider.verify.model.early_kernels import Sketch, compiled_beside
from outrider.verify.model.gpu.compilation import compiled_together
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.experts import KernelRouter
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.load_options import LoadOptions, Quantize
from outrider.verify.model.loading import read_configuration
from outrider.verify.model.torch_runner import TorchRunner
from tests.slow import mostly_slow
from tests.verify.model.cpu.native.files import write_gguf
from tests.verify.model.families import SERVED, config_of
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.emulated_devices import Devices
from tests.verify.model.gpu.test_devices import FIRST, SECOND
from tests.verify.model.gpu.test_ranks import SIZES, model_over

NOWHERE, SMALL = (LoadOptions(""), Location(".")), config_of("llama", NAME)
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=640,
    max_position_embeddings=512,
    dtype="bfloat16",
)


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    found: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16, attn_implementation=NAME)
    return found.to(DEVICE).eval()


def specialization(kernel: Any, name: str, value: Any) -> Any:
    """What a kernel is compiled for of an argument, as Triton has it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    is_constant = kernel.fn.__annotations__.get(name) in (tl.constexpr, "tl.constexpr") or name not in kernel.arg_names
    if is_constant or not isinstance(value, int | float):
        return value
    return type(value), name not in (kernel.kwargs["do_not_specialize"] or ()) and (value == 1, value % 16 == 0)


def launched(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels that forwards compile. None runs, and their outputs have values that are no index."""
    found = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        found.add((kernel.__name__, *sorted((name, specialization(kernel, name, value)) for name, value in named.items())))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", note)
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN and large numbers
        try:
            run()
        finally:
            torch.use_deterministic_algorithms(False)
    return found


def check_equal(sketch: Sketch, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the kernels of a sketch with those of the model."""
    filled = sketch.filled()
    for each in (filled, model):
        use_kernels(each)
    monkeypatch.setattr(sketch, "filled", lambda: filled)
    of_sketch = launched(sketch.run, monkeypatch)
    alone = dict.fromkeys(range(model.config.num_hidden_layers), 1)
    of_model = launched(lambda: TorchRunner(model, started=False).run_all(alone), monkeypatch)
    assert of_sketch == of_model != set()


def whole_model(config: Any, folder: Path) -> PreTrainedModel:
    """As transformers reads it, which leaves some weights in float32."""
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=NAME)
    return found._apply(torch.clone).to(DEVICE).eval()  # which is aligned, as on a GPU


@pytest.mark.parametrize("family", mostly_slow(SERVED, "gemma4", "deepseek_v3", "qwen3_5_moe"))
def test_a_sketch_has_the_kernels_of_its_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(family, NAME)
    check_equal(
        Sketch(LoadOptions(""), config, torch.bfloat16, [DEVICE], None, False), whole_model(config, tmp_path), monkeypatch
    )


def test_experts_that_pytorch_computes_keep_their_routers(tmp_path: Path) -> None:
    """They would read indices that a kernel has not computed yet."""
    model = whole_model(config_of("qwen3_moe", NAME, hidden_act="relu2"), tmp_path)
    use_kernels(model)
    assert not any(isinstance(each, KernelRouter) for each in model.modules())


def test_a_sketch_has_the_pages_of_each_device(devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third device has fewer layers than the others."""
    places, model = [torch.device("cpu", number) for number in range(3)], whole_model(SMALL, tmp_path)
    sketch = Sketch(LoadOptions(""), SMALL, torch.bfloat16, places, None, False)
    Placement(model, places).move()
    check_equal(sketch, model, monkeypatch)


@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_a_sketch_is_split_as_its_model(quantize: Quantize, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    options, places = LoadOptions("", device="cpu:0+cpu:1", quantize=quantize), (FIRST, SECOND)
    sketch = Sketch(options, config_of("qwen3", NAME, **SIZES), torch.bfloat16, places, None, False)
    check_equal(sketch, model_over("qwen3", quantize, *places, layers=4), monkeypatch)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_sketch_has_the_forms_of_its_model(
    model: PreTrainedModel, is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are rounded to 4 bits, or blocks of a file, whose second layer has a tensor of another type."""
    if is_file:
        kinds = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
        path, other = (write_gguf(model, tmp_path / f"{kind.name}.gguf", kind) for kind in kinds)
    else:
        model.save_pretrained(path := tmp_path)
    options, location = LoadOptions(str(path), quantize="none" if is_file else "int4"), locate(str(path))
    config, source = read_configuration(options, location, True), read(options, location)
    assert source is not None
    if is_file:
        mixed = read(LoadOptions(str(other)), locate(str(other)))
        assert mixed is not None
        name = "blk.1.ffn_down.weight"
        source.tensors[name] = mixed.tensors[name]
    monkeypatch.setattr(file_model, "read", lambda *_: source)
    whole = file_model.load(options, location, config, torch.bfloat16, [DEVICE], DEVICE)
    assert whole is not None
    sketch = Sketch(options, config, torch.bfloat16, [DEVICE], source, is_file)
    assert sketch.layers == [0, 1][: 1 + is_file]
    check_equal(sketch, whole, monkeypatch)


@pytest.mark.parametrize("fails_early", [False, True])
def test_a_failure_is_only_logged(fails_early: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Sketch, "__init__" if fails_early else "run", fail)
    caplog.set_level(logging.DEBUG, "outrider.worker")
    with compiled_beside(*NOWHERE, SMALL, torch.bfloat16, [DEVICE], False):
        pass
    assert [each.levelno for each in caplog.records if "beside the load" in each.message] == [logging.DEBUG]
    assert not any(each.name == "outrider-kernels" for each in threads())
    with compiled_together():  # is free again
        pass


def test_an_error_of_the_load_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)
    beside = compiled_beside(*NOWHERE, SMALL, torch.bfloat16, [DEVICE], False)
    with pytest.raises(KeyboardInterrupt), beside:
        raise KeyboardInterrupt
    assert not any(each.name == "outrider-kernels" for each in threads())
