"""Quantised checkpoints: their weights' values, what is not read; and layers that are quantised while they load."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.verify import checkpoint
from outrider.verify.errors import ModelError
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.weights import KINDS, Kind
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.load_options import LoadOptions, Quantize
from outrider.verify.model.quantization import quantize_model
from outrider.verify.model.quantized.formats import whole_layers
from outrider.verify.model.tensors import read_safetensors
from tests.slow import mostly_slow
from tests.verify.model.cpu.native.models import build, runner_of
from tests.verify.model.quantized.checkpoints import BY_NAME, FORMS, ROUNDED, Form, save

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
SIZES: dict[str, Any] = {"intermediate_size": 128}  # NVFP4 has blocks of 64 inputs
# One form of each kind, also for models whose layers are stacked or fused.
CASES = [(family, form) for family in ("llama", "qwen3_moe", "phi3") for form in {form.kind: form for form in FORMS}.values()]
TOKENS = ForwardBatch.chain(np.arange(40))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_have_the_values_of_the_formula(form: Form, tmp_path: Path) -> None:
    parts, weights = form.write(np.random.default_rng(0), 40, 192)
    save_file({"layer.bias": torch.ones(40), **{f"layer{end}": each for end, each in parts.items()}}, tmp_path / "file")
    stored = read_safetensors("a model", [tmp_path / "file"])
    assert stored is not None
    layers = whole_layers(stored, form.config)
    assert {*layers} == {"layer.weight", "layer.bias"}
    layer = layers["layer.weight"]
    assert KINDS.get(layer.type, Kind.BFLOAT16) == form.kind
    found, expected = layer.floats(), weights.numpy()
    if form.name in ROUNDED:
        assert np.array_equal(found, weights.bfloat16().float().numpy())
    else:
        np.testing.assert_allclose(found, expected, rtol=2e-7)  # the product of two scales is rounded
    some = layer.take(np.array([7, 3, 39]))
    assert np.array_equal(some.floats(), found[[7, 3, 39]])


def runner(folder: Path) -> NativeRunner:
    found = load_weights(LoadOptions(str(folder), device="cpu"))
    assert isinstance(found, NativeRunner)
    found.start(64)
    return found


def forward(model: NativeRunner, tokens: ForwardBatch = TOKENS) -> Any:
    return np.asarray(model.forward(model.new_cache(), tokens))


@pytest.mark.parametrize(
    ("family", "form"), mostly_slow(CASES, *CASES[: len(CASES) // 3 : 2], *CASES[len(CASES) // 3 :: 6]), ids=str
)
def test_a_checkpoint_is_packed_as_it_is(family: str, form: Form, tmp_path: Path) -> None:
    model = build(family, **({"moe_intermediate_size": 64} if family == "qwen3_moe" else SIZES))
    packed, plain = (runner(save(tmp_path / str(each), model, [form], plain=each)) for each in (False, True))
    assert packed.decoder.layers[1].query.matrix.kind == form.kind
    found, expected = forward(packed), forward(plain)
    if family != "qwen3_moe":  # whose rows choose other experts when they are rounded to 9 bits
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    assert np.array_equal(forward(packed, ForwardBatch.chain(np.arange(3))), found[:3])


def test_layers_of_a_checkpoint_may_differ(tmp_path: Path) -> None:
    forms = [BY_NAME["GPTQ"], BY_NAME["GPTQ, 8 bits"], None]  # what the setting `dynamic` of GPTQModel leads to
    packed, plain = (runner(save(tmp_path / str(each), build("llama"), forms, plain=each)) for each in (False, True))
    kinds = {getattr(packed.decoder.layers[1], name).matrix.kind for name in ("query", "key", "value", "output", "gate", "up")}
    assert kinds == {Kind.ZERO4, Kind.ZERO8, Kind.FLOAT32}
    found, expected = forward(packed), forward(plain)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_the_file_of_modelopt_names_the_format_alone(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", build("llama", **SIZES), [BY_NAME["NVFP4 of ModelOpt"]])
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": settings["quant_algo"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert runner(folder).decoder.layers[0].down.matrix.kind == Kind.NVFP4


def test_tensors_that_do_not_belong_together_are_one_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", build("llama"), [BY_NAME["GPTQ"]])
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.scales.*download it again"):
        load_weights(LoadOptions(str(folder), device="cpu"))


@pytest.mark.parametrize("settings", [{"version": "gemv_fast"}, {"version": "marlin"}, {"backend": "llm-awq"}])
def test_another_packing_needs_the_packages_of_transformers(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = BY_NAME["AWQ"]
    folder = save(tmp_path / "model", build("llama"), [Form("", form.config | settings, form.kind, form.write)])
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="in the format awq, which needs gptqmodel and accelerate; install"):
        load_weights(LoadOptions(str(folder), device="cpu"))


def test_what_transformers_does_not_read_either_is_one_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", build("llama", **SIZES), [BY_NAME["NVFP4 of ModelOpt"]])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.pre_quant_scale"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"a form of modelopt that is not read here \(.*pre_quant_scale.*serve a GGUF file"):
        load_weights(LoadOptions(str(folder), device="cpu"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "exl3"}}))
    with pytest.raises(ModelError, match="in the format 'exl3', which is not read here; serve a GGUF file"):
        load_weights(LoadOptions(str(folder), device="cpu"))


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
