"""Models on a GPU whose weights are those of files: values as other readers have them, products, and blocks that are mapped."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.verify.checkpoint import locate
from outrider.verify.model import file_model
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native import packed_file
from outrider.verify.model.cpu.native.weights import KINDS as CPU_KINDS
from outrider.verify.model.cpu.native.weights import Kind
from outrider.verify.model.file_model import load
from outrider.verify.model.gpu.experts import quantize_experts, way_of
from outrider.verify.model.gpu.forms import common_form
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.gpu.quantized import BlockLinear, Blocks, joined_blocks, quantized
from outrider.verify.model.gpu.stored_blocks import KINDS, as_blocks
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import read_configuration, read_model
from outrider.verify.model.quantization import layer_bits
from outrider.verify.model.sizes import end_tokens
from outrider.verify.model.stored import Stored
from outrider.verify.model.torch_runner import TorchRunner
from tests.slow import mostly_slow
from tests.verify.model import families
from tests.verify.model.cpu.native.files import write_gguf
from tests.verify.model.cpu.native.models import FAMILIES, build
from tests.verify.model.cpu.native.test_gguf import IN_CHECKPOINTS, UNSAID
from tests.verify.model.cpu.native.test_packed_file import wait_written
from tests.verify.model.cpu.native.test_weights import STORED, dequantized, random_blocks
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.picture_models import FAMILIES as PICTURES
from tests.verify.model.quantized.checkpoints import BY_NAME, save

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 128, "max_window_layers": 2}
# transformers takes these sizes for granted.
HEADS: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 128}, "gemma2": {"head_dim": 256}}
HEADS |= {"qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 768}}
# What only transformers reads of files; tables of positions for short texts, as in phi3, are not read.
UNREAD = ("gemma3n_text", "gemma4_text", "gemma4_unified_text", "phi3")
# Inputs of whole blocks.
WHOLE: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
WHOLE |= {"moe_shared_expert_intermediate_size": 64, "shared_intermediate_size": 64}
# With fewer outputs, integers do not fill words.
WIDER: dict[str, Any] = {"deepseek_v3": {"q_lora_rank": 64}, "kimi_linear": {"linear_num_heads": 8}}
WIDER |= {"olmo_hybrid": {"linear_num_key_heads": 8, "linear_num_value_heads": 8}}
# Of the families that have more than Llama's parts: experts in one tensor, latent attention, states, and several residuals.
OTHERS: tuple[str, ...] = ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next", "kimi_linear", "granitemoehybrid")
OTHERS += ("nemotron_h", "mamba2", "lfm2_moe", "gemma3n_text", "gemma4_text", "falcon_h1", "olmo_hybrid")
READ_IN_FILES = [name for name in FAMILIES if name not in (*IN_CHECKPOINTS, *UNREAD)]
KIND = GGMLQuantizationType.Q8_0


def loaded(path: Path, **options: Any) -> PreTrainedModel:
    given, location = LoadOptions(str(path), **options), locate(str(path))
    found = made(given, location, read_configuration(given, location, True), torch.float32, [DEVICE], DEVICE)
    wait_written()
    return found


def made(*given: Any) -> PreTrainedModel:
    found = load(*given)
    assert found is not None
    return found


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All weights by name, float32 on the host, with those of blocks as they are."""
    layers = {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, BlockLinear)}
    blocks = {name.replace("_proj.weight", "_proj") if ".experts." in name else name: each for name, each in layers.items()}
    found = {name: each.float().cpu() for name, each in model.state_dict().items()}
    return found | {name: each.blocks.weights().cpu() for name, each in blocks.items()}


def check_equal(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Blocks exactly, and numbers as they are rounded to the model's data type."""
    given, wanted = weights_of(found), weights_of(expected)
    assert given.keys() == wanted.keys()
    numbers = {name for name, each in found.state_dict().items() if each.numel()}
    for name, each in given.items():
        values = wanted[name].reshape(each.shape)
        assert torch.equal(each, values.to(found.dtype).float() if name in numbers else values), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma2"])
def test_a_file_has_the_weights_that_transformers_reads(family: str, tmp_path: Path) -> None:
    file = write_gguf(build(family, **SIZES | HEADS.get(family, {})), tmp_path / "model.gguf", KIND)
    found = loaded(file)
    assert found.dtype == torch.bfloat16
    check_equal(found, AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32))
    assert sum(isinstance(each, BlockLinear) for each in found.modules()) == (13 if family == "qwen3_moe" else 15)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("llama", form) for form in ("AWQ", "packed, channels", "MXFP4")),
        *mostly_slow([(family, "GPTQ") for family in ("llama", *OTHERS)], *((family, "GPTQ") for family in OTHERS[:6])),
    ],
)
def test_a_checkpoint_has_its_integers(family: str, form: str, tmp_path: Path) -> None:
    model = build(family, **WHOLE | (SIZES if family == "llama" else {}), **WIDER.get(family, {}))
    packed, plain = (save(tmp_path / str(each), model, [BY_NAME[form]], plain=each) for each in (False, True))
    found, expected = loaded(packed), weights_of(AutoModelForCausalLM.from_pretrained(plain))
    for name, each in weights_of(found).items():
        torch.testing.assert_close(each, expected[name].reshape(each.shape), rtol=2e-7, atol=1e-7)
    kept = {name for name, each in found.named_modules() if isinstance(each, torch.nn.Linear) and name.endswith("_proj")}
    assert not {name for name in kept if BY_NAME[form].kind.fits(found.get_submodule(name).in_features)}


@pytest.mark.parametrize("family", mostly_slow(READ_IN_FILES, *({*OTHERS} & {*READ_IN_FILES})))
def test_a_file_of_any_family_has_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    model, tokens = build(family, **UNSAID.get(family, {})), np.arange(3, 40)
    found = TorchRunner(loaded(write_gguf(model, tmp_path / "model.gguf"), dtype="float32"), started=False)
    expected = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    given = found.forward(found.new_cache(), ForwardBatch.chain(tokens)).cpu()
    assert (given - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text", "mamba2"])
def test_a_file_of_another_family_has_its_blocks(family: str, tmp_path: Path) -> None:
    """All but what makes keys of latents, whose blocks lie along its outputs, and small layers."""
    sizes: dict[str, Any] = {"q_lora_rank": 64, "qk_nope_head_dim": 32} if family in ("deepseek_v3", "glm4_moe_lite") else {}
    model = build(family, **WHOLE, **sizes)
    found = loaded(write_gguf(model, tmp_path / "model.gguf", KIND))
    plain = {name for name, each in found.named_modules() if isinstance(each, torch.nn.Linear)}
    assert {name.rpartition(".")[2] for name in plain} <= {"kv_b_proj", "shared_expert_gate"}
    given = weights_of(found)
    for name, each in model.state_dict().items():
        wanted = each.transpose(1, 2) if family == "gpt_oss" and each.ndim == 3 else each
        if name.endswith("out_proj.weight"):  # whose inputs may be in another order
            rows = torch.randn(2, each.shape[1], device=DEVICE).bfloat16()
            result = found.get_submodule(name.removesuffix(".weight"))(rows)
            assert (result.cpu() - rows.float().cpu() @ each.T).norm() < 0.02 * result.norm()
        else:
            assert (given[name].reshape(wanted.shape) - wanted).abs().max() <= 0.01 * wanted.abs().max(), name


def test_a_file_has_the_parts_of_a_state_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values, and gates, as newer files of Qwen3-Next have them; corrections and steps."""
    model, add = build("qwen3_next"), gguf.GGUFWriter.add_tensor
    config: Any = model.config
    key, ratio = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
    value = ratio * config.linear_value_head_dim

    def apart(writer: Any, name: str, tensor: Any, **fields: Any) -> None:
        sizes = {"ssm_in": [key, key, value, value], "ssm_ba": [ratio, ratio]}.get(name.split(".")[-2])
        if sizes is None:
            add(writer, name, tensor, **fields)
            return
        heads = tensor.reshape(config.linear_num_key_heads, sum(sizes), -1)
        parts = [each.reshape(-1, tensor.shape[1]) for each in np.split(heads, np.cumsum(sizes)[:-1], 1)]
        names = ("attn_qkv", "attn_gate") if len(parts) == 4 else ("ssm_beta", "ssm_alpha")
        for part, rows in zip(names, (np.concatenate(parts[:-1]), parts[-1]), strict=True):
            add(writer, f"{name.rpartition('.ssm')[0]}.{part}.weight", rows, **fields)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", apart)
    found = loaded(write_gguf(model, tmp_path / "model.gguf"), dtype="float32").state_dict()
    for name, each in model.state_dict().items():
        torch.testing.assert_close(found[name].cpu(), each, rtol=1e-6, atol=1e-6)


def test_experts_of_gpt_oss_are_its_blocks(tmp_path: Path) -> None:
    """In its own checkpoints, and with weights that are rounded, whose inputs are their rows."""
    model = build("gpt_oss", **WHOLE)
    model.save_pretrained(tmp_path)
    tensors, kind = load_file(tmp_path / "model.safetensors"), GGMLQuantizationType.MXFP4
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2).contiguous()
        blocks = torch.from_numpy(quants.quantize(rows.numpy(), kind)).unflatten(-1, (-1, 17))
        lower, upper = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
        pairs = torch.cat([lower, upper], -1).unflatten(-1, (-1, 2))
        tensors[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << 4
        tensors[f"{name}_scales"] = blocks[..., 0].contiguous()
        expected = quants.dequantize(quants.quantize(rows.numpy(), kind), kind)
        model.get_parameter(name).data = torch.from_numpy(expected).transpose(1, 2)
    rounded = weights_of(loaded(tmp_path, quantize="int8"))
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    found = weights_of(loaded(tmp_path))
    for name, each in model.state_dict().items():
        is_turned = name.endswith(("gate_up_proj", "down_proj"))
        wanted = each.transpose(1, 2) if is_turned else each
        assert torch.equal(found[name], wanted.reshape(found[name].shape)), name
        assert not is_turned or rounded[name].shape == found[name].shape


def test_logits_are_those_of_the_weights(tmp_path: Path) -> None:
    batch, found = (
        ForwardBatch.chain(np.arange(3, 12)),
        loaded(write_gguf(build("llama", **SIZES), tmp_path / "model.gguf", KIND)),
    )
    reference = AutoModelForCausalLM.from_config(found.config, dtype=torch.float32, attn_implementation=NAME)
    reference.load_state_dict(weights_of(found))
    reference.model.rotary_emb.inv_freq = found.model.rotary_emb.inv_freq
    use_kernels(found)
    given, expected = (
        runner.forward(runner.new_cache(), batch).float()
        for runner in (TorchRunner(each.to(DEVICE), started=False) for each in (found, reference))
    )
    assert (given - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("bits", ["none", "int4", "scaled"])
def test_blocks_are_kept_and_mapped(bits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    options = {"packed_folder": tmp_path / "packed", "quantize": "none" if bits == "scaled" else bits}
    if bits == "scaled":
        file = save(tmp_path / "model", build("llama", **SIZES), [BY_NAME["packed, channels"], BY_NAME["NVFP4"]])
    else:
        file = write_gguf(build("qwen3_moe", **SIZES | HEADS["qwen3_moe"]), tmp_path / "model.gguf", KIND)
    first, made = (weights_of(loaded(file, **options | each)) for each in ({}, {"packed_folder": None}))
    assert all(torch.equal(made[name], each) for name, each in first.items())
    assert len([*(tmp_path / "packed").iterdir()]) == 1
    monkeypatch.setattr(file_model, "joined_blocks", lambda *_: pytest.fail("made again"))
    later = weights_of(loaded(file, **options))
    assert all(torch.equal(later[name], each) for name, each in first.items())


UNKNOWN: dict[str, Callable[[], Any]] = {name: family.model for name, family in PICTURES.items()}
UNKNOWN |= {"gpt_neox": partial(families.build, "gpt_neox", "eager")}


@pytest.mark.parametrize("name", mostly_slow(UNKNOWN, "gpt_neox", "smolvlm", "llama4"))
def test_what_only_transformers_reads_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounded weights, of what computes texts; and all others, and what was computed, as transformers has them."""
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    UNKNOWN[name]().save_pretrained(folder := tmp_path / "model")
    options, location = LoadOptions(str(folder), quantize="int8", packed_folder=tmp_path / "packed"), locate(str(folder))
    given = options, location, read_configuration(options, location, True), torch.bfloat16
    on = [DEVICE], DEVICE
    assert load(*given, *on) is None
    reads = partial(read_model, *given, DEVICE, {})
    first, expected = made(*given, *on, reads), reads()
    wait_written()
    later = made(*given, *on, lambda: pytest.fail("read again"))
    for name, bits in layer_bits("int8", expected).items():
        expected.set_submodule(name, quantized(expected.get_submodule(name), bits, DEVICE))
    for module in [each for each in expected.modules() if way_of(each) is not None]:
        quantize_experts(module, 8, DEVICE)
    for found in (first, later):
        check_equal(found, expected)
        assert [each.dtype for each in found.parameters()] == [each.dtype for each in expected.parameters()]
        for name, buffer in expected.named_buffers():
            assert torch.equal(found.get_buffer(name), buffer), name
        assert end_tokens(found) == end_tokens(expected)
    half = partial(read_model, *given[:3], torch.float16, DEVICE, {})
    table = made(*given[:3], torch.float16, *on, half).get_input_embeddings().weight
    assert torch.equal(table, half().get_input_embeddings().weight)


def test_weights_that_transformers_keeps_exact_stay_so(tmp_path: Path) -> None:
    """A file's, too: the biases by which routers choose experts."""
    found = loaded(write_gguf(build("deepseek_v3"), tmp_path / "model.gguf"))
    exact = {name.split(".")[-1] for name, each in found.state_dict().items() if each.dtype == torch.float32}
    assert exact == {"e_score_correction_bias"}


OUTPUTS, INPUTS = 20, 512
EACH = pytest.mark.parametrize("kind", [CPU_KINDS[kind] for kind in KINDS])
# Of each way that kernels read blocks: with and without factors and minimums, of 8 and 4 bits, and of 4-bit floats.
READ = (Kind.Q4_0, Kind.ZERO4, Kind.ZERO8, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q6_K, Kind.IQ2_XS, Kind.NVFP4)


def blocks_of(kind: Kind, seed: int = 0, scales: torch.Tensor | None = None) -> Blocks:
    rows = torch.from_numpy(random_blocks(kind, OUTPUTS, INPUTS, seed)).to(DEVICE)
    return as_blocks(rows, KINDS[STORED[kind]], scales)


def layer(kind: Kind, dtype: torch.dtype, scales: torch.Tensor | None = None) -> BlockLinear:
    return BlockLinear.of(blocks_of(kind, scales=scales), dtype)


@EACH
def test_weights_are_those_of_the_file(kind: Kind) -> None:
    found = blocks_of(kind)
    expected = torch.from_numpy(dequantized(kind, random_blocks(kind, OUTPUTS, INPUTS))).to(DEVICE)
    assert found.form == KINDS[STORED[kind]].form
    if kind in (Kind.INT4, Kind.Q2_K, Kind.Q4_K, Kind.IQ3_S):  # minimums are rounded to 2 ** -17 of the scale
        assert ((found.weights() - expected).abs() <= 2**-16 * expected.unflatten(1, (-1, 32)).abs().amax()).all()
    else:
        assert torch.equal(found.weights(), expected)
    assert torch.equal(Blocks.of_bytes(found.bytes, found.form, OUTPUTS, INPUTS).weights(), found.weights())


@EACH
def test_weights_are_times_the_scales_of_outputs(kind: Kind) -> None:
    blocks, scales = random_blocks(kind, OUTPUTS, INPUTS), torch.rand(OUTPUTS)
    expected = Stored(blocks, STORED[kind], (OUTPUTS, INPUTS)).times(scales.numpy()).floats()
    found = blocks_of(kind, scales=scales.to(DEVICE)).weights()
    torch.testing.assert_close(found.cpu(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "is_scaled"),
    mostly_slow(product(READ, (False, True)), *product(READ, (False,)), (Kind.Q4_K, True)),
)
def test_the_kernel_has_the_same_weights(kind: Kind, is_scaled: bool) -> None:
    """Rows that have one input each give the weights, in float32 where products are exact."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    scales = torch.rand(OUTPUTS) + 0.5 if is_scaled else None
    found = layer(kind, dtype, None if scales is None else scales.to(DEVICE))
    expected = found.blocks.weights().to(dtype).T
    given = found(torch.eye(INPUTS, dtype=dtype, device=DEVICE))
    if scales is None:
        assert torch.equal(given, expected)
    else:  # zeros are rounded to 2 ** -17 of the scale
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", READ)
def test_a_row_has_the_same_bits_in_any_number_of_rows(kind: Kind) -> None:
    found, half = layer(kind, torch.bfloat16), torch.randn(72, INPUTS // 2, device=DEVICE).bfloat16()
    rows = torch.cat([half, -half.flip(1)], 1)
    whole = found(rows)
    expected = rows.double() @ found.blocks.weights().double().T
    assert (whole - expected).norm() < 1e-2 * expected.norm()
    for count in (1, 3, 20):
        assert torch.equal(found(rows[:count].flip(0)), whole[:count].flip(0)), count


BESIDE = [(Kind.Q4_K, Kind.Q6_K), (Kind.Q5_K, Kind.Q6_K), (Kind.Q4_0, Kind.INT4), (Kind.Q5_0, Kind.INT8)]
BESIDE += [(Kind.Q2_K, Kind.Q4_K), (Kind.Q3_K, Kind.Q5_K), (Kind.IQ2_XXS, Kind.Q3_K), (Kind.IQ3_S, Kind.Q4_K)]


@pytest.mark.parametrize("kinds", [*BESIDE, (Kind.MXFP4, Kind.MXFP4)])
def test_layers_of_several_kinds_become_one(kinds: tuple[Kind, Kind]) -> None:
    parts = [blocks_of(kind, seed) for seed, kind in enumerate(kinds)]
    found, expected = joined_blocks(parts).weights(), torch.cat([each.weights() for each in parts])
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-16 * float(expected.abs().max()))


def test_kinds_without_a_common_form() -> None:
    forms: Any = [KINDS[STORED[kind]].form for kind in (Kind.Q4_K, Kind.INT8, Kind.NVFP4)]
    assert common_form(forms[:2]) is None and common_form(forms[1:]) is None
