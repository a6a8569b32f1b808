"""Writes a model of transformers as a GGUF file, as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFValueType, quants
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture, Mixture, State
from outrider.verify.model.architecture.families import FAMILIES
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.experts import split_checkpoint
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import file_name, stored_tensor

TYPES: dict[type, GGUFValueType] = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, bool: GGUFValueType.BOOL}
TYPES |= {str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}
# The numbers that files of every family have, and those that some have, by their names in configurations.
SIZES = {"vocab_size": "vocab_size", "context_length": "max_position_embeddings", "embedding_length": "hidden_size"}
SIZES |= {"block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size"}
SIZES |= {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
SIZES |= {"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}
FACTORS = {each: each for each in ("logit_scale", "final_logit_softcapping", "attn_logit_softcapping")}
GRANITE = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
GRANITE |= {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
SCALED = ("lfm2_moe", "nemotron_h", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")
STATES = ("lfm2", "lfm2_moe", "nemotron_h", "mamba2")
LAYERED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")


def write_gguf(
    model: PreTrainedModel,
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tokenizer: Mapping[str, Any] | None = None,
    others: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """The model with matrices of this type, the entries of a tokenizer if there are some, and `others`, further tensors."""
    config: Any = model.config
    family, sizes = FAMILIES[config.model_type], of_first_layer(config)
    (arch,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(MODEL_ARCH(arch), config.num_hidden_layers)
    known_model = read_config(config.to_dict())
    assert known_model is not None
    writer = gguf.GGUFWriter(file, family.name)
    write_model(writer, config)
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
    for name, values in (others or {}).items():
        write(writer, name, values, kind if values.ndim > 1 else GGMLQuantizationType.F32)
    finish(writer)
    return file


def of_first_layer(config: Any) -> Any:
    return config.per_layer_config[0] if config.is_heterogeneous else config


def add_entries(writer: gguf.GGUFWriter, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        writer.add_key_value(key, value, TYPES[type(value)])


def finish(writer: gguf.GGUFWriter) -> None:
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()


def write(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: GGMLQuantizationType) -> None:
    kind = GGMLQuantizationType.F32 if values.shape[-1] % GGML_QUANT_SIZES[kind][0] else kind
    writer.add_tensor(name, quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def write_model(writer: gguf.GGUFWriter, config: Any) -> None:
    """All that files say about a model, and their tables for positions."""
    known = read_config(config.to_dict())
    assert known is not None
    entries = sizes(config) | of_mixture(config, known.mixture) | of_states(known) | of_latents(known)
    entries |= of_layers(config, known) if config.model_type in LAYERED else of_positions(config)
    add_entries(writer, {f"{known.name}.{key}": value for key, value in entries.items() if value not in (None, [])})
    for name, values in tables(config, known).items():
        writer.add_tensor(name, np.array(values, np.float32))


def sizes(config: Any) -> dict[str, Any]:
    first = of_first_layer(config)
    found = {key: getattr(first, name) for key, name in SIZES.items()}
    factors = GRANITE if config.model_type in ("granite", "granitemoe", "granitemoehybrid") else FACTORS
    found |= {key: float(value) for key, name in factors.items() if (value := getattr(config, name, None))}
    epsilon = next(each for name in EPSILONS if (each := getattr(config, name, None)))
    is_rms = hasattr(config, "rms_norm_eps") or config.model_type in STATES
    return found | {"attention.layer_norm_rms_epsilon" if is_rms else "attention.layer_norm_epsilon": epsilon}


def of_mixture(config: Any, mixture: Mixture | None) -> dict[str, Any]:
    if mixture is None:
        return {}
    has_own = config.model_type not in ("gpt_oss", "mixtral", "olmoe", "granitemoe")
    width = config.moe_intermediate_size if has_own else config.intermediate_size
    found: dict[str, Any] = {"expert_count": mixture.experts, "expert_used_count": mixture.used}
    found["expert_feed_forward_length"] = width
    if config.model_type in SCALED:
        found |= {"expert_weights_norm": mixture.normalizes, "expert_weights_scale": float(mixture.scale)}
        found |= {"expert_group_count": mixture.groups, "expert_group_used_count": mixture.used_groups}
    if config.model_type in ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "kimi_linear"):
        found["expert_gating_func"] = gguf.ExpertGatingFuncType.SIGMOID.value
    return found


def of_states(known: Architecture) -> dict[str, Any]:
    """The numbers of recurrent layers, and which layers they are."""
    found = next((each.recurrence for each in known.layers if each.recurrence is not None), None)
    if found is None:
        return {}
    is_short = found.kind is State.CONVOLUTION
    entries: dict[str, Any] = {"shortconv.l_cache" if is_short else "ssm.conv_kernel": found.window + 1}
    if not is_short and found.decay_dim > 1:
        return entries | {"kda.head_dim": found.key_dim}
    if not is_short:
        entries |= {"ssm.state_size": found.key_dim, "ssm.group_count": found.key_heads}
        entries |= {"ssm.time_step_rank": found.heads, "ssm.inner_size": found.heads * found.value_dim}
    if found.kind is State.DELTA_RULE:
        entries["attention.recurrent_layers"] = [each.recurrence is not None for each in known.layers]
    else:
        entries["attention.head_count_kv"] = [each.kv_heads for each in known.layers]
    if known.name in ("nemotron_h_moe", "mamba2"):
        entries["feed_forward_length"] = [48 if each.feeds else 0 for each in known.layers]
    return entries


def of_latents(known: Architecture) -> dict[str, Any]:
    layer = next((each for each in known.layers if each.latent is not None), None)
    if layer is None or (latent := layer.latent) is None:
        return {}
    rotary = layer.head_dim - latent.rank
    heads: Any = [each.kv_heads for each in known.layers] if known.name == "kimi-linear" else 1
    found: dict[str, Any] = {"head_count_kv": heads, "kv_lora_rank": latent.rank, "q_lora_rank": latent.query_rank or None}
    found |= {"key_length": layer.head_dim, "value_length": latent.rank}
    found |= {"key_length_mla": latent.key_dim + rotary, "value_length_mla": latent.value_dim}
    found = {f"attention.{key}": value for key, value in found.items()}
    return found if known.rotaries else found | {"rope.dimension_count": rotary}


def of_layers(config: Any, known: Architecture) -> dict[str, Any]:
    """What layers with a window and those without have each for themselves."""
    windows = [each.window is not None for each in known.layers]
    found: dict[str, Any] = {"embedding_length_per_layer_input": known.embedding_width}
    for layer, suffix in ((known.layers[windows.index(True)], "_swa"), (known.layers[windows.index(False)], "")):
        table = known.rotaries[layer.rotary or 0]
        found |= {f"rope.dimension_count{suffix}": table.size, f"rope.freq_base{suffix}": float(table.base)}
        found |= {f"attention.{part}_length{suffix}": layer.head_dim for part in ("key", "value")}
    found |= {"attention.head_count_kv": [each.kv_heads for each in known.layers]}
    found |= {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": windows}
    found |= {"attention.shared_kv_layers": config.num_kv_shared_layers}
    if known.residuals:
        found |= {"altup.num_inputs": known.residuals, "altup.active_idx": 0}
        found |= {"activation_sparsity_scale": [each.deviations for each in known.layers]}
    return found


def of_positions(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"rope.scaling.finetuned": getattr(config, "position_embedding_type", "rope") == "rope"}
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "olmo3", "cohere2", "exaone4", "gpt_oss"):
        found["attention.sliding_window"] = config.sliding_window
    if not (given := whole_positions(config)):
        return found
    found["rope.dimension_count"] = int(config.head_dim * given.get("partial_rotary_factor", 1.0))
    found["rope.freq_base"] = float(given["rope_theta"])
    family, kind = FAMILIES[config.model_type], given["rope_type"]
    if family.local_base is not None or config.model_type == "olmo3":
        found["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if kind in ("linear", "yarn", "longrope"):
        found["rope.scaling.type"] = kind
    if kind in ("linear", "yarn"):
        found["rope.scaling.factor"] = float(given["factor"])
    if kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = given["original_max_position_embeddings"]
    if kind == "longrope":
        growth = np.log(given["factor"]) / np.log(given["original_max_position_embeddings"])
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + growth))
    if given.get("attention_factor"):
        found["rope.scaling.yarn_attn_factor"] = given["attention_factor"]
    if given.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = given["mscale_all_dim"] * (0.1 if family.is_latent else 1.0)
    if given.get("llama_4_scaling_beta"):
        found["attention.temperature_scale"] = given["llama_4_scaling_beta"]
    return found


def whole_positions(config: Any) -> Any:
    """The rotary parameters of layers without a window, if there are some."""
    given = getattr(config, "rope_parameters", None)
    return given and given.get("full_attention", given)


def tables(config: Any, known: Architecture) -> dict[str, Any]:
    """What the frequencies of rotary positions are divided by."""
    if config.model_type in LAYERED:
        whole = next(each for each in known.layers if each.window is None)
        rotated = int(np.count_nonzero(frequencies(known.rotaries[whole.rotary or 0], 1)[0]))
        half = whole.head_dim // 2
        return {"rope_freqs.weight": np.where(np.arange(half) < rotated, 1, 1e30)} if rotated < half else {}
    given = whole_positions(config) or {}
    if given.get("rope_type") == "llama3":
        plain = given["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        return {"rope_freqs.weight": plain / ROPE_INIT_FUNCTIONS["llama3"](config, None)[0].numpy()}
    is_long = given.get("rope_type") == "longrope"
    return {f"rope_factors_{each}.weight": given[f"{each}_factor"] for each in ("long", "short") if is_long}


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


def converted(name: str, values: NDArray[np.float32], known: Architecture) -> NDArray[np.float32]:
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
