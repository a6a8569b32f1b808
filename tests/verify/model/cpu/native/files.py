"""Writes a model of transformers as a GGUF file, as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, quants
from numpy.typing import NDArray
from transformers import PreTrainedModel

from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture, Mixture, State
from outrider.verify.model.architecture.families import FAMILIES
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.experts import split_checkpoint
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import file_name, stored_tensor

EPSILONS = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon")
STATES = ("lfm2", "lfm2_moe", "nemotron_h", "mamba2")
LAYERED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
SCALINGS = {name: gguf.RopeScalingType[name.upper()] for name in ("linear", "yarn", "longrope")}


def write_gguf(
    model: PreTrainedModel,
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """The model with matrices of this type, and the entries of a tokenizer if there are some."""
    config: Any = model.config
    family, sizes = FAMILIES[config.model_type], of_first_layer(config)
    (arch,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(MODEL_ARCH(arch), config.num_hidden_layers)
    known_model = read_config(config.to_dict())
    assert known_model is not None
    writer = gguf.GGUFWriter(file, family.name)
    write_sizes(writer, config)
    if config.model_type in LAYERED:
        write_layered(writer, config, known_model)
    else:
        write_positions(writer, config, family.local_base is not None or config.model_type == "olmo3")
    add_entries(writer, {"tokenizer.ggml.model": "no_vocab"} if tokenizer is None else tokenizer)
    turned = family.pairs_in_files and not family.pairs_in_checkpoints
    stored = {name: stored_tensor(tensor) for name, tensor in model.state_dict().items()}
    tensors = split_checkpoint({name: each for name, each in stored.items() if each is not None}, family.turns_experts)
    for name in ("altup_projections", "altup_unembed_projections") if known_model.residuals else ():
        parts = [tensors.pop(f"model.{name}.{number}.weight").floats() for number in range(known_model.residuals - 1)]
        stem = "altup_proj" if name == "altup_projections" else "altup_unembd_proj"
        write(writer, f"{stem}.weight", np.stack(parts), kind)
    experts = {name for name in tensors if "_exps." in name}
    for place in sorted({(name.split(".")[1], name.split(".")[2], name.split(".")[4]) for name in experts}):
        layer, part, ending = place
        count = sum(name.startswith(f"blk.{layer}.{part}.") and name.endswith(ending) for name in experts)
        values = np.stack([tensors[f"blk.{layer}.{part}.{number}.{ending}"].floats() for number in range(count)])
        write(writer, f"blk.{layer}.{part}.{ending}", values, kind if ending == "weight" else GGMLQuantizationType.F32)
    if latent := next((each.latent for each in known_model.layers if each.latent is not None), None):
        tensors = split_latents(tensors, config.num_attention_heads, latent.key_dim)
    for name, each in tensors.items():
        if name in experts or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = converted(name, each.floats(), known_model)
        heads = {"q_proj": sizes.num_attention_heads, "k_proj": sizes.num_key_value_heads}.get(name.split(".")[-2])
        if heads and turned:
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if family.norms_less_one and "norm" in name and name.endswith("weight") and "linear_attn" not in name:
            values = values + 1
        known = file_name(names, name)
        assert known is not None
        if "attn_k_b" in known or "attn_v_b" in known:
            values = values.reshape(config.num_attention_heads, -1, values.shape[1])
        is_small = values.ndim < 2 or "gate_inp" in known
        write(writer, known, values, GGMLQuantizationType.F32 if is_small else kind)
    finish(writer)
    return file


def of_first_layer(config: Any) -> Any:
    """The configuration with the first layer's own sizes."""
    return config.per_layer_config[0] if config.is_heterogeneous else config


def add_entries(writer: gguf.GGUFWriter, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()


def write(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: GGMLQuantizationType) -> None:
    writer.add_tensor(name, quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def write_layered(writer: gguf.GGUFWriter, config: Any, known: Architecture) -> None:
    """What layers with a window and those without have each for themselves."""
    layers, windows = known.layers, [each.window is not None for each in known.layers]
    local, whole = layers[windows.index(True)], layers[windows.index(False)]
    for table, suffix in ((known.rotaries[local.rotary or 0], "_swa"), (known.rotaries[whole.rotary or 0], "")):
        writer.add_uint32(f"{known.name}.rope.dimension_count{suffix}", table.size)
        writer.add_float32(f"{known.name}.rope.freq_base{suffix}", table.base)
    for layer, suffix in ((local, "_swa"), (whole, "")):
        for part in ("key", "value"):
            writer.kv_data[0].pop(f"{known.name}.attention.{part}_length{suffix}", None)
            writer.add_uint32(f"{known.name}.attention.{part}_length{suffix}", layer.head_dim)
    writer.kv_data[0].pop(f"{known.name}.attention.head_count_kv")
    writer.add_head_count_kv([each.kv_heads for each in layers])
    writer.add_sliding_window(config.sliding_window)
    writer.add_array(f"{known.name}.attention.sliding_window_pattern", windows)
    writer.add_uint32(f"{known.name}.attention.shared_kv_layers", config.num_kv_shared_layers)
    writer.add_uint32(f"{known.name}.embedding_length_per_layer_input", known.embedding_width)
    if known.residuals:
        writer.add_altup_num_inputs(known.residuals)
        writer.add_altup_active_idx(0)
        writer.add_activation_sparsity_scale([each.deviations for each in layers])
    rotated = int(np.count_nonzero(frequencies(known.rotaries[whole.rotary or 0], 1)[0]))
    if rotated < whole.head_dim // 2:
        writer.add_tensor("rope_freqs.weight", np.where(np.arange(whole.head_dim // 2) < rotated, 1, 1e30).astype(np.float32))


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """The numbers that files of every family have."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)


def write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """All but what is about positions."""
    add_sizes(writer, of_first_layer(config))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        epsilon = next(each for name in EPSILONS if (each := getattr(config, name, None)))
        writer.add_layer_norm_rms_eps(epsilon) if config.model_type in STATES else writer.add_layer_norm_eps(epsilon)
    if config.model_type in ("granite", "granitemoe", "granitemoehybrid"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if known := read_config(config.to_dict()):
        write_mixture(writer, config, known.mixture)
        write_states(writer, known)
        write_latents(writer, known)
    if getattr(config, "logit_scale", None):
        writer.add_logit_scale(config.logit_scale)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)


def write_mixture(writer: gguf.GGUFWriter, config: Any, mixture: Mixture | None) -> None:
    if mixture is None:
        return
    writer.add_expert_count(mixture.experts)
    writer.add_expert_used_count(mixture.used)
    if config.model_type in (
        "lfm2_moe",
        "nemotron_h",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "kimi_linear",
    ):
        writer.add_expert_weights_norm(mixture.normalizes)
        writer.add_expert_weights_scale(mixture.scale)
        writer.add_expert_group_count(mixture.groups)
        writer.add_expert_group_used_count(mixture.used_groups)
    has_own = config.model_type not in ("gpt_oss", "mixtral", "olmoe", "granitemoe")
    writer.add_expert_feed_forward_length(config.moe_intermediate_size if has_own else config.intermediate_size)
    if config.model_type in ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "kimi_linear"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_latents(writer: gguf.GGUFWriter, known: Architecture) -> None:
    """The sizes of latent attention."""
    layer = next((each for each in known.layers if each.latent is not None), None)
    if layer is None or (latent := layer.latent) is None:
        return
    for key in ("head_count_kv", "key_length", "value_length"):
        writer.kv_data[0].pop(f"{known.name}.attention.{key}", None)
    rotary = layer.head_dim - latent.rank
    writer.add_head_count_kv([each.kv_heads for each in known.layers] if known.name == "kimi-linear" else 1)
    if not known.rotaries:
        writer.add_rope_dimension_count(rotary)
    writer.add_kv_lora_rank(latent.rank)
    if latent.query_rank:
        writer.add_q_lora_rank(latent.query_rank)
    writer.add_key_length(layer.head_dim)
    writer.add_value_length(latent.rank)
    writer.add_key_length_mla(latent.key_dim + rotary)
    writer.add_value_length_mla(latent.value_dim)


def split_latents(tensors: Mapping[str, Stored], heads: int, key_dim: int) -> dict[str, Stored]:
    """With the weights of keys, transposed, [heads * rank, key_dim], apart from those of values."""
    found = dict(tensors)
    for name in [each for each in tensors if "kv_b_proj" in each]:
        values = found.pop(name).floats()
        keys, rest = np.split(values.reshape(heads, -1, values.shape[1]), [key_dim], 1)
        for part, each in (("k_b", keys.swapaxes(1, 2)), ("v_b", rest)):
            rows = np.ascontiguousarray(each).reshape(-1, each.shape[2])
            stored = Stored(rows.view(np.uint8), GGMLQuantizationType.F32, rows.shape)
            found[name.replace("kv_b", part)] = stored
    return found


def write_states(writer: gguf.GGUFWriter, known: Architecture) -> None:
    """The numbers of recurrent layers, and which layers they are."""
    found = next((each.recurrence for each in known.layers if each.recurrence is not None), None)
    if found is None:
        return
    if found.kind is State.CONVOLUTION:
        writer.add_shortconv_l_cache(found.window + 1)
    elif found.decay_dim > 1:
        writer.add_ssm_conv_kernel(found.window + 1)
        writer.add_kda_head_dim(found.key_dim)
        return
    else:
        writer.add_ssm_conv_kernel(found.window + 1)
        writer.add_ssm_state_size(found.key_dim)
        writer.add_ssm_group_count(found.key_heads)
        writer.add_ssm_time_step_rank(found.heads)
        writer.add_ssm_inner_size(found.heads * found.value_dim)
    if found.kind is State.DELTA_RULE:
        recurrent = [each.recurrence is not None for each in known.layers]
        writer.add_array(f"{known.name}.attention.recurrent_layers", recurrent)
    else:
        writer.kv_data[0].pop(f"{known.name}.attention.head_count_kv", None)
        writer.add_head_count_kv([each.kv_heads for each in known.layers])
    if known.name in ("nemotron_h_moe", "mamba2"):
        writer.kv_data[0].pop(f"{known.name}.feed_forward_length")
        writer.add_feed_forward_length([48 if each.feeds else 0 for each in known.layers])


def converted(name: str, values: NDArray[np.float32], known: Architecture) -> NDArray[np.float32]:
    """A tensor as files have it."""
    if "conv" in name and values.ndim == 2 and "proj" not in name:  # [channels, 1, inputs] as rows
        values = values.reshape(values.shape[0], -1)
    if name.endswith("A_log"):
        values = -np.exp(values)
    for ending, scale in multipliers(known).items():
        if ending in name:
            return np.asarray(values * scale, np.float32)
    found = known.layers[0].recurrence
    if found is None or known.name not in ("qwen35", "qwen35moe") or "linear_attn" not in name:
        return values
    ratio, keys = found.heads // found.key_heads, 2 * found.key_heads * found.key_dim
    tiled = np.arange(found.heads).reshape(found.key_heads, ratio).T.reshape(-1)
    channels = (tiled[:, None] * found.value_dim + np.arange(found.value_dim)).reshape(-1)
    if "qkv" in name or "conv1d" in name:
        return np.concatenate([values[:keys], values[keys:].take(channels, 0)])
    if "in_proj_z" in name:
        return values.take(channels, 0)
    if "out_proj" in name:
        return values.take(channels, 1)
    return values if "norm" in name else values.take(tiled, 0)


def multipliers(known: Architecture) -> dict[str, Any]:
    """What Falcon-H1's converter multiplies tensors by, by parts of their names."""
    given = known.multipliers
    if not given:
        return {}
    names = ("query", "key", "value", "output", "gate", "down", "state output")
    endings = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "out_proj")
    found = known.layers[0].recurrence
    assert found is not None
    inner, keys = found.heads * found.value_dim, found.key_heads * found.key_dim
    parts = [given[each] for each in ("state gate", "values", "keys", "queries", "step")]
    rows = np.repeat(np.array(parts, np.float32), [inner, inner, keys, keys, found.heads])[:, None]
    whole = {"in_proj": rows, "embed_tokens": known.embedding_scale, "lm_head": known.logit_scale}
    return {ending: given[name] for ending, name in zip(endings, names, strict=True)} | whole


def write_positions(writer: gguf.GGUFWriter, config: Any, has_local: bool) -> None:
    """Windows, rotary tables and their scaling."""
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "olmo3", "cohere2", "exaone4", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_finetuned(getattr(config, "position_embedding_type", "rope") == "rope")
    if not getattr(config, "rope_parameters", None):
        return
    given = config.rope_parameters.get("full_attention", config.rope_parameters)
    size = int(config.head_dim * given.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(given["rope_theta"])
    if has_local:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    kind = given["rope_type"]
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(given, size))
    if kind in SCALINGS:
        writer.add_rope_scaling_type(SCALINGS[kind])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(given["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(given["original_max_position_embeddings"])
    if kind == "longrope":
        factor, original = given["factor"], given["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(given[f"{name}_factor"], np.float32))
    if given.get("attention_factor"):
        writer.add_rope_scaling_yarn_attn_factor(given["attention_factor"])
    if given.get("mscale_all_dim"):
        is_latent = FAMILIES[config.model_type].is_latent
        writer.add_rope_scaling_yarn_log_mul(given["mscale_all_dim"] * (0.1 if is_latent else 1.0))
    if given.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(given["llama_4_scaling_beta"])


def llama3_divisors(given: Any, size: int) -> NDArray[np.float32]:
    """What the frequencies of Llama 3.1 are divided by."""
    waves = 2 * np.pi * given["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    kept = np.clip((given["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    found: NDArray[np.float32] = (1 / (kept + (1 - kept) / given["factor"])).astype(np.float32)
    return found
