"""GGUF files of every packed type: the logits of the same file with unpacked weights, and a row's bits alone and in company."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from numpy.linalg import norm
from transformers import LlamaConfig

from outrider import models
from outrider.verify.checkpoint import stored_bytes
from outrider.verify.errors import ModelError
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.backend import load_model
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.weights import GRIDS, Kind
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.tensors import read_gguf
from tests.gguf_folders import write_folder
from tests.slow import mostly_slow
from tests.verify.model.cpu.native import files
from tests.verify.model.cpu.native.files import finish, write_gguf
from tests.verify.model.cpu.native.models import FAMILIES, VARIED, build, runner_of
from tests.verify.model.cpu.native.test_weights import STORED, dequantized, random_blocks

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
IN_FILES = [kind for kind in STORED if kind < Kind.ZERO4]
# Blocks of 32 and of 256, with a scale and with a minimum, and one of the kinds with grids, of which tables become bfloat16.
IN_TABLES = [STORED[kind] for kind in (Kind.INT8, Kind.INT4, Kind.Q3_K, Kind.Q4_K, Kind(GRIDS[0]))]
IN_TABLES += [GGMLQuantizationType.BF16, GGMLQuantizationType.F16]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
CONFIG = LlamaConfig(
    vocab_size=100, hidden_size=256, intermediate_size=512, num_hidden_layers=2, max_position_embeddings=256, **HEADS
)
LAYER = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
LAYER |= {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
SHAPES = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}
SHAPES |= {"token_embd": (100, 256), "output": (100, 256)}
# Files have neither windows of these families nor dynamic scaling of positions, and no OLMo Hybrid.
IN_CHECKPOINTS = ("mistral", "ministral", "qwen2", "olmo_hybrid")
# What files do not say.
UNSAID: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "nemotron_h": {"time_step_min": 1e-6},
}
NORMS = ["output_norm", *(f"blk.{layer}.{name}_norm" for layer in range(2) for name in ("attn", "ffn"))]


def write(file: Path, kind: Kind, unpacked: bool, scale: float = 1.0) -> Path:
    """A small Llama with random blocks, which have a `scale` of their own; `unpacked` are their values in float32."""
    writer = gguf.GGUFWriter(file, "llama")
    files.write_model(writer, CONFIG)
    for name in NORMS:
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    for seed, (name, shape) in enumerate(SHAPES.items()):
        blocks, own = random_blocks(kind, *shape, seed=seed), 1.0 if name == "token_embd" else scale
        if unpacked:
            writer.add_tensor(f"{name}.weight", dequantized(kind, blocks) * np.float32(own))
        else:
            if own != 1:
                writer.add_tensor(f"{name}.scale", np.array([own], np.float32))
                writer.add_tensor(f"{name}.input_scale", np.array([9], np.float32))
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType(STORED[kind]))
    finish(writer)
    return file


def runner(file: Path, dtype: str = "auto") -> NativeRunner:
    found = load_model(LoadOptions(str(file), device="cpu", context_tokens=128, dtype=dtype))
    assert isinstance(found, NativeRunner)
    return found


@pytest.mark.parametrize(("kind", "scale"), [*((kind, 1.0) for kind in IN_FILES), (Kind.NVFP4, 0.7)])
def test_logits_are_those_of_the_unpacked_weights(kind: Kind, scale: float, tmp_path: Path) -> None:
    tokens = ForwardBatch.chain(torch.arange(40))
    packed, plain = (runner(write(tmp_path / f"{each}.gguf", kind, each, scale)) for each in (False, True))
    assert {packed.decoder.table.kind, packed.decoder.layers[1].down.matrix.kind} == {kind}
    expected = plain.forward(plain.new_cache(), tokens)
    found = packed.forward(packed.new_cache(), tokens)
    assert norm(found - expected) < 0.05 * norm(expected)  # rows are rounded to 9 bits in every layer


def test_a_model_in_several_files_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, kind = ForwardBatch.chain(torch.arange(40)), IN_FILES[0]
    whole = runner(write(tmp_path / "whole.gguf", kind, False))
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=5))
    write(tmp_path / "split.gguf", kind, False)
    first, second, *_ = sorted(tmp_path.glob("split-*.gguf"))
    split = runner(first)
    assert np.array_equal(split.forward(split.new_cache(), tokens), whole.forward(whole.new_cache(), tokens))
    assert stored_bytes(str(first)) == sum(file.stat().st_size for file in tmp_path.glob("split-*.gguf"))
    second.unlink()
    with pytest.raises(ModelError, match=rf"There is no file '{second}'; download it again\."):
        runner(first)


def test_experts_have_scales_of_their_own(tmp_path: Path) -> None:
    blocks, scales = random_blocks(Kind.NVFP4, 8, 64), np.array([0.5, 3], np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen3moe")
    writer.add_tensor("blk.0.ffn_up_exps.weight", blocks.reshape(2, 4, -1), raw_dtype=GGMLQuantizationType.NVFP4)
    writer.add_tensor("blk.0.ffn_up_exps.scale", scales)
    finish(writer)
    tensors = read_gguf([tmp_path / "x.gguf"])
    found = np.stack([tensors[f"blk.0.ffn_up_exps.{number}.weight"].floats() for number in range(2)])
    assert np.array_equal(found, dequantized(Kind.NVFP4, blocks).reshape(2, 4, 64) * scales[:, None, None])


def test_a_scale_of_no_known_tensor_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", Kind.NVFP4, False, scale=0.7)
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_up.scale", b"blk.0.ffn_xx.scale"))
    with pytest.raises(ModelError, match=r"ffn_xx\.scale .* scales blk\.0\.ffn_xx"):
        runner(file)


@pytest.mark.parametrize(
    "family",
    mostly_slow([name for name in FAMILIES if name not in IN_CHECKPOINTS], *sorted({*VARIED}.difference(IN_CHECKPOINTS))),
)
def test_a_file_has_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    model, tokens = build(family, **UNSAID.get(family, {})), ForwardBatch.chain(torch.arange(64))
    expected, ours = runner_of(model, context_tokens=128), runner(write_gguf(model, tmp_path / "model.gguf"), "float32")
    found, wanted = (each.forward(each.new_cache(), tokens) for each in (ours, expected))
    assert norm(found - wanted) < 1e-5 * norm(wanted)


def test_a_quantised_file_is_quantised_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(Path(models.TARGET), tmp_path / "x.gguf", GGMLQuantizationType.Q8_0)
    options = LoadOptions(str(models.TARGET), dtype="float32", device="cpu", context_tokens=128)
    tokens, whole = ForwardBatch.chain(torch.arange(20, 60)), load_model(options)
    with caplog.at_level("INFO", "outrider.worker"):
        again = load_model(replace(options, path=str(tmp_path / "x.gguf"), quantize="int8"))
    found, wanted = (each.forward(each.new_cache(), tokens) for each in (again, whole))
    assert norm(found - wanted) < 0.03 * norm(wanted)
    assert any("8.5 bits per weight in the file" in record.message for record in caplog.records)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0])
def test_files_of_latent_attention_with_both_weights_in_one_tensor(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = build("deepseek_v3", first_k_dense_replace=6, q_lora_rank=64), ForwardBatch.chain(torch.arange(64))
    apart = runner(write_gguf(model, tmp_path / "apart.gguf", kind), "float32")
    of_latents, lengths = files.of_latents, ("attention.key_length", "attention.value_length")

    def in_one(known: Architecture) -> dict[str, Any]:
        found = of_latents(known)
        return found | {each: found.pop(f"{each}_mla") for each in lengths}

    monkeypatch.setattr(files, "split_latents", lambda tensors, *_: tensors)
    monkeypatch.setattr(files, "of_latents", in_one)
    whole = runner(write_gguf(model, tmp_path / "whole.gguf", kind), "float32")
    found, expected = (each.forward(each.new_cache(), tokens) for each in (whole, apart))
    # Blocks of 8 bits lie along other dimensions of the two.
    assert norm(found - expected) < (1e-5 if kind == GGMLQuantizationType.F16 else 0.2) * norm(expected)


@pytest.mark.parametrize("kind", IN_TABLES)
def test_a_table_for_layers_has_the_values_of_its_file(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = build("gemma4_text", hidden_size_per_layer_input=256), ForwardBatch.chain(torch.arange(40))
    packed = next((each for each in STORED if STORED[each] == kind), None)
    if packed is not None:
        blocks = random_blocks(packed, 97, 6 * 256)
    else:
        blocks = quants.quantize(np.random.default_rng(1).standard_normal((97, 6 * 256), np.float32), kind)
    table = quants.dequantize(blocks, kind).astype(np.float32)
    add = gguf.GGUFWriter.add_tensor

    def logits(values: Any, dtype: GGMLQuantizationType) -> torch.Tensor:
        def changed(writer: gguf.GGUFWriter, key: str, tensor: Any, **fields: Any) -> None:
            if key == "per_layer_token_embd.weight":
                tensor, fields = values, {"raw_dtype": dtype}
            add(writer, key, tensor, **fields)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
        ours = runner(write_gguf(model, tmp_path / f"{dtype.name}.gguf"), "float32")
        found = torch.from_numpy(ours.forward(ours.new_cache(), tokens))
        return found

    found, expected = logits(blocks.view(np.uint8), kind), logits(table, GGMLQuantizationType.F32)
    is_rounded = packed in GRIDS  # to bfloat16
    assert (found - expected).norm() < (1e-2 if is_rounded else 1e-4) * expected.norm()


# Tensors of each kind, which are read in ways of their own.
TENSORS = {
    "qwen2": "blk.1.attn_q.bias",
    "qwen3": "blk.0.attn_q_norm.weight blk.1.ffn_norm.weight",
    "gpt_oss": "blk.0.attn_sinks.weight",
    "glm4_moe": "blk.1.exp_probs_b.bias",
    "granitemoehybrid": "blk.0.ssm_a blk.2.ssm_d blk.0.ssm_dt.bias blk.0.ssm_norm.weight blk.0.ssm_conv1d.weight",
    "kimi_linear": "blk.0.ssm_a blk.0.ssm_dt.bias blk.2.ssm_conv1d_k.weight blk.0.ssm_f_b.weight blk.3.ssm_g_a.weight",
    "lfm2": "blk.0.shortconv.conv.weight token_embd_norm.weight",
    "deepseek_v3": "blk.1.attn_q_a_norm.weight blk.1.attn_k_b.weight blk.1.attn_v_b.weight blk.1.attn_kv_a_mqa.weight",
    "gemma3n_text": "blk.0.altup_router.weight blk.1.altup_predict_coef.weight blk.3.laurel_r.weight altup_proj.weight",
    "gemma4_text": "blk.0.layer_output_scale.weight blk.1.ffn_down_exps.scale per_layer_token_embd.weight",
}


EACH = [(family, each) for family, names in TENSORS.items() for each in names.split()]


@pytest.mark.parametrize(("family", "name"), mostly_slow(EACH, *[(family, TENSORS[family].split()[0]) for family in TENSORS]))
@pytest.mark.parametrize("factor", [pytest.param(2, marks=pytest.mark.slow), 0.5])
def test_a_tensor_of_another_size_is_one_sentence(
    family: str, name: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_tensor

    def changed(writer: gguf.GGUFWriter, key: str, values: Any, **fields: Any) -> None:
        if key.removesuffix(".weight") == name.removesuffix(".weight"):
            values = np.resize(values, (*values.shape[:-1], int(values.shape[-1] * factor)))
        add(writer, key, values, **fields)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
    file = write_gguf(build(family), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="download it again"):
        runner(file, "float32")
