"""Checkpoints of GPTQ, AWQ, compressed-tensors and float8: their weights' values, as blocks where these lose nothing."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider.verify.errors import ModelError
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.interface import NativeRunner, compiled_library
from outrider.verify.model.cpu.native.weights import Kind
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.quantized_tensors import whole_layers
from outrider.verify.model.tensors import read_safetensors
from tests.verify.model.cpu.native.models import build

GROUP = 32
LINEAR = re.compile(r"(_proj)\.weight$")
TOKENS = ForwardBatch.chain(np.arange(40))


@dataclass(frozen=True)
class Form:
    """How a checkpoint stores its weights, and as what they are packed."""

    method: str
    bits: int
    symmetric: bool
    kind: Kind
    settings: tuple[tuple[str, Any], ...] = ()
    in_order: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """Its part of the configuration."""
        found: dict[str, Any] = {"quant_method": self.method, **dict(self.settings)}
        if self.method == "compressed-tensors":
            return found | {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": self.bits}}}}
        return found | {"bits": self.bits, "group_size": GROUP}


FORMS = [
    Form("gptq", 4, True, Kind.Q4_0),
    Form("gptq", 4, False, Kind.ZERO4),
    Form("gptq", 4, False, Kind.ZERO4, (("checkpoint_format", "gptq_v2"),)),
    Form("gptq", 4, False, Kind.BFLOAT16, in_order=False),
    Form("gptq", 8, True, Kind.INT8),
    Form("gptq", 8, False, Kind.ZERO8),
    Form("awq", 4, False, Kind.ZERO4),
    Form("compressed-tensors", 4, True, Kind.Q4_0),
    Form("compressed-tensors", 4, False, Kind.ZERO4),
    Form("compressed-tensors", 8, False, Kind.ZERO8),
]


def words(values: Any, bits: int) -> NDArray[np.int32]:
    """Packs integers of `bits` bits, [rows, count], into 32-bit words."""
    parts = values.astype(np.uint32).reshape(len(values), -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    found: NDArray[np.int32] = np.bitwise_or.reduce(parts, -1).view(np.int32)
    return found


def written(form: Form, outputs: int, inputs: int, seed: int) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """A layer's tensors by the ends of their names, and the weights that they mean."""
    generator = np.random.default_rng(seed)
    groups, values = inputs // GROUP, generator.integers(0, 1 << form.bits, (outputs, inputs))
    least = 0 if "gptq_v2" in str(form.settings) or form.method != "gptq" else 1
    zeros = generator.integers(max(least, 1 if form.bits == 8 else 0), 1 << form.bits, (outputs, groups))
    if form.symmetric:
        zeros[:] = 1 << (form.bits - 1)
    scales = (generator.uniform(0.5, 1.5, (outputs, groups)) * 0.3 / (1 << form.bits)).astype(np.float16)
    order = np.arange(inputs) // GROUP
    if not form.in_order:
        generator.shuffle(order)
    weights = ((values - zeros[:, order]) * scales.astype(np.float32)[:, order]).astype(np.float32)
    if form.method == "compressed-tensors":
        found = {"weight_packed": words(values, form.bits), "weight_scale": scales, "weight_shape": np.array([outputs, inputs])}
        if not form.symmetric:
            found["weight_zero_point"] = words(zeros.T, form.bits).T
        return found, weights
    if form.method == "awq":
        turns = [0, 2, 4, 6, 1, 3, 5, 7]
        packed = [words(each.T.reshape(-1, outputs // 8, 8)[..., turns].reshape(-1, outputs), 4) for each in (values, zeros)]
        return {"qweight": packed[0], "qzeros": packed[1], "scales": scales.T}, weights
    found = {"qweight": words(values, form.bits).T, "qzeros": words(zeros.T - least, form.bits), "scales": scales.T}
    return found | {"g_idx": order.astype(np.int32)}, weights


def save(folder: Path, model: Any, form: Form | None, seed: int = 0) -> Path:
    """A checkpoint of the model with random linear layers, or, without a form, one of those that `FORMS[1]` means."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, name in enumerate([each for each in tensors if LINEAR.search(each)]):
        outputs, inputs = tensors.pop(name).shape
        parts, weights = written(form or FORMS[1], outputs, inputs, seed + number)
        if form is None:
            tensors[name] = torch.from_numpy(weights)
        else:
            stem = name.removesuffix("weight")
            tensors |= {stem + end: torch.from_numpy(np.ascontiguousarray(each)) for end, each in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    if form is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    return folder


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_have_the_values_of_the_formula(form: Form, tmp_path: Path) -> None:
    parts, weights = written(form, 40, 96, 0)
    save_file({f"layer.{end}": torch.from_numpy(np.ascontiguousarray(each)) for end, each in parts.items()}, tmp_path / "file")
    stored = read_safetensors("a model", [tmp_path / "file"])
    assert stored is not None
    layers = whole_layers(stored, form.config)
    assert layers is not None and [*layers] == ["layer.weight"]
    expected = torch.from_numpy(weights)
    if form.kind == Kind.BFLOAT16:
        expected = expected.bfloat16().float()
    assert np.array_equal(layers["layer.weight"].floats(), expected.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_is_rounded_as_transformers_does(dtype: torch.dtype, tmp_path: Path) -> None:
    values, scales = torch.randn(40, 96).to(torch.float8_e4m3fn), torch.rand(2, 3).to(dtype)
    save_file({"layer.weight": values, "layer.weight_scale_inv": scales, "bias": scales.clone()}, tmp_path / "file")
    stored = read_safetensors("a model", [tmp_path / "file"])
    assert stored is not None
    layers = whole_layers(stored, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    assert layers is not None and {*layers} == {"layer.weight", "bias"}
    squares = scales.float().repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)
    expected = (values.float() * squares).bfloat16().float()
    assert np.array_equal(layers["layer.weight"].floats(), expected.numpy())


@pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_checkpoint_is_packed_as_it_is(family: str, form: Form, tmp_path: Path) -> None:
    model = build(family, moe_intermediate_size=64) if family == "qwen3_moe" else build(family)
    packed = load_weights(LoadOptions(str(save(tmp_path / "packed", model, form)), device="cpu"))
    assert isinstance(packed, NativeRunner)
    assert packed.decoder.layers[1].query.matrix.kind == form.kind
    if form.method == "gptq" and form.kind == Kind.ZERO4 and not form.settings:
        plain = load_weights(LoadOptions(str(save(tmp_path / "plain", model, None)), device="cpu"))
        for each in (packed, plain):
            each.start(64)
        found, expected = (np.asarray(each.forward(each.new_cache(), TOKENS)) for each in (packed, plain))
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)  # rows are rounded to 9 bits


def test_tensors_that_do_not_belong_together_are_one_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", build("llama"), FORMS[0])
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="download it again"):
        load_weights(LoadOptions(str(folder), device="cpu"))
