"""A GGUF file gives the model of the folder it was made from, with its vocabulary and chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.model.gguf_file import convert
from bench.plan import BenchError
from outrider import models
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native import interface as native
from outrider.verify.model.load_options import LoadOptions, Quantization, Quantize
from outrider.verify.model.runner import ModelRunner
from outrider.verify.tokenizer import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
TARGET = Path(models.TARGET)


def logits(path: Path, quantize: Quantize = "none") -> torch.Tensor:
    options = LoadOptions(str(path), dtype="float32", device="cpu", quantization=Quantization(quantize))
    runner: ModelRunner = load_weights(options)
    runner.start(64)
    return torch.as_tensor(runner.forward(runner.new_cache(), ForwardBatch.chain(range(20, 60))))


def test_a_file_has_the_model_the_vocabulary_and_the_template(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    expected, file = logits(TARGET), tmp_path / "model.gguf"
    convert(TARGET, file)
    assert torch.allclose(logits(file), expected, atol=1e-4)
    given, own = load_tokenizer(str(file)), load_tokenizer(str(TARGET))
    assert own.get_vocab().items() <= given.get_vocab().items()  # transformers adds a token of its own
    assert (given.chat_template, given.eos_token_id) == (own.chat_template, own.eos_token_id)


@pytest.mark.skipif(native.compiled_library() is None, reason="the library was not compiled")
def test_a_quantised_file_is_quantised_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("gguf")
    expected, file = logits(TARGET), tmp_path / "model.gguf"
    convert(TARGET, file, "Q8_0")
    with caplog.at_level("INFO", "outrider.worker"):
        given = logits(file, "int8")
    assert (given - expected).norm() < 0.03 * expected.norm()
    assert any("8.5 bits per weight in the file" in record.message for record in caplog.records)


def test_only_llamas_are_converted(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(BenchError, match="no Llama"):
        convert(tmp_path, tmp_path / "model.gguf")
