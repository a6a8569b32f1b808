"""Reads the metadata of a GGUF file. Names of keys are those of llama.cpp."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.verify.model.architecture.config import described
from outrider.verify.model.architecture.defaults import COMMON
from outrider.verify.model.architecture.description import Architecture, Rotary, Scores, State
from outrider.verify.model.architecture.families import BY_FILE, Family
from outrider.verify.model.architecture.rotary import is_known
from outrider.verify.model.architecture.standard import FULL, LINEAR, SLIDING

# Tensors that scale positions, by the name of their scaling.
DIVISORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


# llama.cpp's numbers of how scores are computed.
SCORES = {1: Scores.SOFTMAX, 2: Scores.SIGMOID, 3: Scores.CHOSEN_SOFTMAX}
# Keys of files by standard names.
NAMES = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "attention_multiplier": "attention.scale",
    "sliding_window": "attention.sliding_window",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "embedding_multiplier": "embedding_scale",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "altup_num_inputs": "altup.num_inputs",
    "residual_multiplier": "residual_scale",
    "num_experts": "expert_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "conv_L_cache": "shortconv.l_cache",
    **dict.fromkeys(("conv_kernel", "linear_conv_kernel_dim"), "ssm.conv_kernel"),
    **dict.fromkeys(("mamba_num_heads", "linear_num_value_heads"), "ssm.time_step_rank"),
    **dict.fromkeys(("n_groups", "linear_num_key_heads"), "ssm.group_count"),
    **dict.fromkeys(("state_size", "linear_key_head_dim"), "ssm.state_size"),
}
# Of recurrent layers of Kimi Linear.
KIMI = {
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), "attention.head_count"),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), "kda.head_dim"),
}
# Whose files do not say that weights of experts are not normalised.
UNNORMALIZED = ("qwen2moe", "olmoe")


class Entries:
    """The entries of a file about its architecture, by keys without its name."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self.name = str(entries.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self._entries.get(f"{self.name}.{key}", default)

    def __getitem__(self, key: str) -> Any:
        return self._entries[f"{self.name}.{key}"]

    def by_layer(self, key: str, layers: int, default: Any = None) -> list[Any]:
        """A value of each layer: files have one for all, or a list."""
        found = self.get(key, default)
        return list(found) if isinstance(found, list) else [found] * layers


def read_entries(given: Mapping[str, Any], vocabulary: int, vectors: Mapping[str, Any]) -> Architecture | None:
    """The decoder of a file; None if its family is not known. `vectors` are the tensors about positions, by name.

    Raises KeyError, TypeError and ValueError for a file that lacks what it needs.
    """
    entries = Entries(given)
    family = BY_FILE.get(entries.name)
    if family is None or entries.get("altup.active_idx", 0):
        return None
    rotaries = read_rotaries(entries, family, vectors) if family.encodes_positions else []
    if not all(map(is_known, rotaries)):
        return None
    config = standard_names(entries, family)
    config |= {"vocab_size": vocabulary, "rope_parameters": rotaries[0].scaling if rotaries else {}}
    config |= read_layers(entries, family)
    if family.is_latent:
        config |= read_latent(entries, rotaries)
    if config.get("num_experts"):
        config |= read_experts(entries, family)
    numbers = {None: 0, SLIDING: len(rotaries) - 1} if rotaries else {}
    return described(config, family, rotaries, numbers, activation=family.activation, has_pairs=family.pairs_in_files)


def standard_names(entries: Entries, family: Family) -> dict[str, Any]:
    """The numbers of a file that configurations have, too."""
    names = {**NAMES, **(KIMI if family.decays_rows else {})}
    found = {**COMMON, **{name: value for name, key in names.items() if (value := entries.get(key))}}
    found["rms_norm_eps"] = entries.get("attention.layer_norm_rms_epsilon") or entries.get("attention.layer_norm_epsilon")
    capped = family.capped or (None, None)
    for name, cap in zip(("attn_logit_softcapping", "final_logit_softcapping"), capped, strict=True):
        found[name] = entries.get(name, cap) or None
    # Granite's files have what logits are divided by, Cohere's what they are multiplied by.
    found["logits_scaling" if family.name.startswith("granite") else "logit_scale"] = entries.get("logit_scale", 1.0)
    if family.state not in (None, State.CONVOLUTION) and not family.decays_rows:
        width = entries.get("ssm.inner_size") // entries.get("ssm.time_step_rank")
        found |= {"mamba_head_dim": width, "linear_value_head_dim": width, "is_tiled": family.tiles_in_files}
    return found


def read_experts(entries: Entries, family: Family) -> dict[str, Any]:
    """How the mixtures of experts choose."""
    normalizes = family.name not in UNNORMALIZED if family.normalizes is None else family.normalizes
    # Files of DeepSeek V2 say neither; some of GLM-4.7-Flash do not say the scores.
    has_sigmoids = family.is_latent and entries.get("expert_weights_norm")
    return {
        "num_experts_per_tok": entries["expert_used_count"],
        "norm_topk_prob": entries.get("expert_weights_norm", normalizes),
        "scores": SCORES.get(entries.get("expert_gating_func"), Scores.SIGMOID if has_sigmoids else family.scores),
    }


def head_width(entries: Entries, is_local: bool = False) -> int:
    heads = entries.by_layer("attention.head_count", 1)[0]
    own = entries.get("attention.key_length_swa") if is_local else None
    return int(own or entries.get("attention.key_length") or entries.get("embedding_length") // max(1, heads))


def read_layers(entries: Entries, family: Family) -> dict[str, Any]:
    count = entries.get("block_count") - entries.get("nextn_predict_layers", 0)
    heads = entries.by_layer("attention.head_count", count)
    kv_heads = entries.by_layer("attention.head_count_kv", count, heads)
    window = entries.get("attention.sliding_window")
    windowed = entries.get("attention.sliding_window_pattern", family.window_every)
    if not isinstance(windowed, list):  # a number N: every N-th layer has no window
        windowed = [windowed is None or (number + 1) % windowed != 0 for number in range(count)]
    recurrent, feeds = read_recurrent(entries, family, count), entries.by_layer("feed_forward_length", count)
    kinds, sizes = [], {}
    for number in range(count):
        has_heads = family.is_latent or kv_heads[number]
        keeps_state = recurrent[number] and not (family.has_both and has_heads)
        kinds.append(LINEAR if keeps_state else "mlp" if not has_heads else SLIDING if windowed[number] else FULL)
        width = None if family.is_latent else head_width(entries, bool(window and windowed[number]))
        own = {"num_attention_heads": heads[number], "num_key_value_heads": kv_heads[number], "head_dim": width}
        sizes[number] = own | {"feeds": feeds[number]}
    is_wide, every, rotates = count == family.wide_scaling_at, family.plain_every, entries.get("rope.scaling.finetuned", True)
    return {
        "layer_types": kinds,
        "per_layer_config": sizes,
        "query_pre_attn_scalar": entries.get("embedding_length") // heads[0] if is_wide else None,
        "no_rope_layers": [rotates and (number + 1) % every != 0 for number in range(count)] if every else None,
        "position_embedding_type": "rope" if rotates else None,
        "deviations": entries.by_layer("activation_sparsity_scale", count, -math.inf),
    }


def read_latent(entries: Entries, rotaries: Sequence[Rotary]) -> dict[str, Any]:
    """The sizes of latent attention. In older files, the widths of keys and values are those of heads, and not of latents."""
    key, value = (
        int(entries.get(f"attention.{part}_length_mla") or entries.get(f"attention.{part}_length")) for part in ("key", "value")
    )
    rotated = rotaries[0].size if rotaries else entries.get("rope.dimension_count")
    sizes = {"qk_nope_head_dim": key - rotated, "qk_rope_head_dim": rotated, "v_head_dim": value}
    return sizes | {name: entries.get(f"attention.{name}") for name in ("kv_lora_rank", "q_lora_rank")}


def read_recurrent(entries: Entries, family: Family, count: int) -> list[bool]:
    if family.state is None or family.has_both:
        return [family.has_both] * count
    if family.state is State.DELTA_RULE and not family.is_latent:
        every = entries.get("full_attention_interval", 4)
        plain = [(number + 1) % every != 0 for number in range(count)]
        return list(entries.get("attention.recurrent_layers", plain))[:count]
    kv_heads = entries.by_layer("attention.head_count_kv", count, 0)
    feeds = entries.by_layer("feed_forward_length", count)
    return [not each and (family.feeds or not feed) for each, feed in zip(kv_heads, feeds, strict=False)]


def read_rotaries(entries: Entries, family: Family, vectors: Mapping[str, Any]) -> list[Rotary]:
    """The rotary table of layers that attend to the whole text, and that of the others if it differs."""
    size, context = entries.get("rope.dimension_count", head_width(entries)), entries.get("context_length")
    base = entries.get("rope.freq_base", 10000.0)
    scaling = read_scaling(entries, family, vectors)
    whole = Rotary(size, base, scaling, context)
    local_base = entries.get("rope.freq_base_swa", family.local_base or base)
    local_size = entries.get("rope.dimension_count_swa", size)
    local = Rotary(local_size, local_base, scaling if family.scales_local else {}, context)
    has_local = bool(entries.get("attention.sliding_window")) and family.window_every
    return [whole, local] if has_local and local != whole else [whole]


def read_scaling(entries: Entries, family: Family, vectors: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of positions, by transformers' names."""
    kind, factor = entries.get("rope.scaling.type"), entries.get("rope.scaling.factor")
    original = entries.get("rope.scaling.original_context_length")
    attention, temperature = entries.get("rope.scaling.attn_factor"), entries.get("attention.temperature_scale")
    found: dict[str, Any] = {"rope_type": "default" if kind in (None, "none") else kind}
    if DIVISORS in vectors:
        found["divisors"] = tuple(vectors[DIVISORS])
    if LONG in vectors:
        found |= {"rope_type": "longrope", "long_factor": tuple(vectors[LONG]), "short_factor": tuple(vectors[SHORT])}
        found["attention_factor"] = attention or 1.0
    elif kind == "yarn":
        multiplier = entries.get("rope.scaling.yarn_log_multiplier")
        if multiplier and family.is_latent:  # ten times as much, and the same for cosines and sines
            found |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
        elif multiplier:
            found |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        if not family.truncates_yarn:
            found["truncate"] = False
        names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        found |= {name: entries.get(f"rope.scaling.yarn_{key}") for name, key in names.items()}
    if factor:
        found["factor"] = factor
    if original:
        found["original_max_position_embeddings"] = original
    if temperature:
        found["llama_4_scaling_beta"] = temperature
    return {name: value for name, value in found.items() if value is not None}
