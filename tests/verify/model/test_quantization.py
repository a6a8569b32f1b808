"""Models whose layers are quantised while they load: which layers, how much memory, and lossless drafting."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.verify.errors import ModelError
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.load_options import LoadOptions, Quantize
from outrider.verify.model.quantization import quantize_model
from tests.verify.model.cpu.native.models import build, runner_of

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")


def load(path: Path, quantize: Quantize) -> NativeRunner:
    found = load_weights(LoadOptions(str(path), device="cpu", quantize=quantize))
    assert isinstance(found, NativeRunner)
    return found


@pytest.fixture(params=[("llama", True), ("llama", False), ("qwen2", True)], ids=["tied", "untied", "biased"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model in two files."""
    family, tied = request.param
    model = build(family, num_hidden_layers=2, tie_word_embeddings=tied, initializer_range=0.02)
    model.save_pretrained(tmp_path, max_shard_size="80KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_loading_gives_the_bits_of_quantising_the_loaded_model(saved: Path, quantize: Quantize) -> None:
    loaded, whole = load(saved, quantize), load(saved, "none")
    expected = AutoModelForCausalLM.from_pretrained(saved)
    reference = runner_of(expected, 128, quantize=quantize)
    batch = ForwardBatch.chain(torch.arange(3, 20))
    loaded.start(128)
    given = loaded.forward(loaded.new_cache(), batch)
    assert np.array_equal(given, reference.forward(reference.new_cache(), batch))
    whole.start(128)
    plain = whole.forward(whole.new_cache(), batch)
    norm = np.linalg.norm
    assert 0 < norm(given - plain) < (0.05 if quantize == "int8" else 0.25) * norm(plain)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_the_quantised_size_and_one_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 10, "vocab_size": 8192}
    config = LlamaConfig(**sizes, num_attention_heads=12, num_key_value_heads=4)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="200MB")
    for quantize in ("int8", "int4"):
        command = [sys.executable, "-m", "tests.verify.loading_peak", str(tmp_path), quantize]
        ratio = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert ratio < 1.15, quantize


def test_a_model_without_full_weights_is_reported(tiny_config: LlamaConfig) -> None:
    model: Any = LlamaForCausalLM(tiny_config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = type("Other", (torch.nn.Linear,), {})
    with pytest.raises(ModelError, match=r"set model\.quantize to none"):
        quantize_model(model, "int8", Placement(model, [torch.device("cpu")]))
