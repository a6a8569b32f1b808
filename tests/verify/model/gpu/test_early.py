"""Kernels that are compiled while a model loads: those of a sketch are the model's, and a failure changes nothing."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import enumerate as threads
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from triton.runtime.interpreter import InterpretedFunction

from outrider.verify.checkpoint import Location, locate
from outrider.verify.model import file_model
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cpu.native.loading import read
from outrider.verify.model.early import Sketch, compiled_beside
from outrider.verify.model.gpu.compilation import compiled_together
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.gpu.text_work import INVARIANT_ROWS
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import read_configuration
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.cpu.native.files import write_gguf
from tests.verify.model.gpu.conftest import DEVICE

LAYERS, CONTEXT = 3, 512
NOWHERE = LoadOptions(""), Location(".")
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=640,
    max_position_embeddings=CONTEXT,
    dtype="bfloat16",
)


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    found: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16, attn_implementation=NAME)
    return found.to(DEVICE).eval()


def launched(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels of forwards, with the types of their tensors and all other arguments. None runs."""
    found = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        named |= {name: (each.dtype, each.data_ptr() % 16) for name, each in named.items() if isinstance(each, torch.Tensor)}
        found.add((kernel.__name__, *sorted(named.items())))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", note)
        run()
    return found


def check_equal(sketch: Sketch, model: PreTrainedModel, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the kernels of a sketch of this many layers with those of the model."""
    filled = sketch.filled(DEVICE)
    for each in (filled, model):
        use_kernels(each)
    monkeypatch.setattr(sketch, "filled", lambda _: filled)
    of_sketch = launched(lambda: sketch.run(DEVICE), monkeypatch)
    of_model = launched(lambda: TorchRunner(model, started=False).run_fused(INVARIANT_ROWS, LAYERS), monkeypatch)
    assert of_sketch == of_model != set()
    assert filled.config.num_hidden_layers == layers


def test_a_sketch_has_the_kernels_of_its_model(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal(Sketch(LoadOptions(""), CONFIG, torch.bfloat16, None, False), model, 1, monkeypatch)


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
    whole = file_model.load(options, location, config, torch.bfloat16, [DEVICE])
    assert whole is not None
    check_equal(Sketch(options, config, torch.bfloat16, source, is_file), whole, 1 + is_file, monkeypatch)


@pytest.mark.parametrize("fails_early", [False, True])
def test_a_failure_is_only_logged(fails_early: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Sketch, "__init__" if fails_early else "run", fail)
    caplog.set_level(logging.DEBUG, "outrider.worker")
    with compiled_beside(*NOWHERE, CONFIG, torch.bfloat16, DEVICE, False):
        pass
    assert [each.levelno for each in caplog.records if "beside the load" in each.message] == [logging.DEBUG]
    assert not any(each.name == "outrider-kernels" for each in threads())
    with compiled_together():  # is free again
        pass


def test_an_error_of_the_load_ends_the_threads() -> None:
    beside = compiled_beside(*NOWHERE, CONFIG, torch.bfloat16, DEVICE, False)
    with pytest.raises(KeyboardInterrupt), beside:
        raise KeyboardInterrupt
    assert not any(each.name == "outrider-kernels" for each in threads())
