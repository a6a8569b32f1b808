"""Standardises a configuration: one name for each number, and the family's own number where the file has none.

Takes the content of a config.json of any age, and what configurations of transformers become as dictionaries. Knows nothing
about how a model computes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from outrider.verify.model.architecture.defaults import DEFAULTS, EXPERTS, SIZES
from outrider.verify.model.architecture.description import State
from outrider.verify.model.architecture.families import FAMILIES, Family

TIED = "tie_word_embeddings"
# The names of a number in files, of which the first one counts, by the name that it gets.
NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_act": ("hidden_activation", "mlp_hidden_act", "hidden_act"),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"),
    TIED: ("tie_embedding", "tie_word_embeddings"),
    EXPERTS[0]: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    EXPERTS[1]: ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"),
    "norm_topk_prob": ("moe_renormalize", "norm_topk_prob"),
    "n_group": ("num_expert_group", "n_group"),
    "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
    "linear_num_value_heads": ("linear_num_heads", "linear_num_value_heads"),
    "linear_num_key_heads": ("linear_num_heads", "linear_num_key_heads"),
    "linear_key_head_dim": ("linear_head_dim", "linear_key_head_dim"),
    "linear_value_head_dim": ("linear_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim": ("linear_short_conv_kernel_size", "linear_conv_kernel_dim"),
    "conv_kernel": ("mamba_d_conv", "conv_kernel"),
    "mamba_num_heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "mamba_head_dim": ("mamba_d_head", "mamba_head_dim"),
    "n_groups": ("mamba_n_groups", "n_groups"),
    "state_size": ("mamba_d_state", "ssm_state_size", "state_size"),
    "time_step_min": ("mamba_dt_min", "time_step_min"),
    "time_step_limit": ("mamba_dt_limit", "time_step_limit"),
    "layer_types": ("layers_block_type", "layer_types"),
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Kinds of layers by older names, and by the letters of Nemotron's patterns.
KINDS = {"mamba": LINEAR, "attention": FULL, "M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}
# Scalings of positions that know how long texts were in the first training.
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
# Phi-3's names of its scaling.
OLD_LONGROPE = ("su", "yarn")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about text of a model that also reads pictures or sounds, or else the whole configuration."""
    given, own = config.get("text_config"), f"{config.get('model_type')}_text"
    text = given if isinstance(given, Mapping) else {}
    if own in FAMILIES:
        return {**text, "model_type": own}
    return text or config


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the layer that computes logits is the embedding table, in a configuration of a known family."""
    default = DEFAULTS[config["model_type"]][TIED]
    return bool(next((config[name] for name in NAMES[TIED] if config.get(name) is not None), default))


def standard(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a known family. Raises ValueError for a size that is none, and what damaged files lead to."""
    model = config["model_type"]
    family, default = FAMILIES[model], DEFAULTS[model]
    own = config.get("linear_attn_config") or {}  # of Kimi Linear's delta rule
    config = {**config, **{f"linear_{name}": value for name, value in own.items()}}
    found = {**default, **config}
    for name, names in NAMES.items():
        if given := [config[each] for each in names if each in config]:
            found[name] = next((value for value in given if value is not None), None)
    found["layer_types"] = layer_types(found, family)
    found["num_hidden_layers"] = len(found["layer_types"])
    check_sizes(found)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):  # OLMo Hybrid's are None
        found[name] = found[name] or found["num_attention_heads"]
    found["linear_key_head_dim"] = found["linear_key_head_dim"] or int(
        0.75 * found["hidden_size"] / found["linear_num_key_heads"]
    )
    found["linear_value_head_dim"] = found["linear_value_head_dim"] or 2 * found["linear_key_head_dim"]
    if family.is_latent:
        found["head_dim"] = found["qk_rope_head_dim"]
    if found.get("mamba_head_dim") == "auto":
        inner = found.get("mamba_d_ssm") or found["mamba_expand"] * found["hidden_size"]
        found["mamba_head_dim"] = inner // found["mamba_num_heads"]
    if model == "gemma" and found["hidden_act"] == "gelu":  # the first files say so, and mean the other
        found["hidden_act"] = default["hidden_act"]
    if not uses_window(found):
        found["sliding_window"] = None
    if family.plain_every and not found.get("no_rope_layers"):
        found["no_rope_layers"] = rotated_layers(found)
    if family.name == "gemma3n" and found.get("activation_sparsity_pattern") is None:
        layers = found["num_hidden_layers"]
        found["activation_sparsity_pattern"] = [0.95 if layers > 10 and number < 10 else 0.0 for number in range(layers)]
    found["per_layer_config"] = own_numbers(found, family)
    found["rope_parameters"] = positions(config, found, family)
    return found


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a size that is no whole number above zero."""
    for name in SIZES:
        size = config[name]
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name} is {size!r}, which is no whole number above zero")


def uses_window(config: Mapping[str, Any]) -> bool:
    """Whether layers may have a window. Only families that say so by default have a switch."""
    has_switch = "use_sliding_window" in DEFAULTS[config["model_type"]]
    return bool(config["use_sliding_window"] if has_switch else True)


def layer_types(config: Mapping[str, Any], family: Family) -> list[str]:
    """The kinds of layers: as listed, as Nemotron's pattern says, or as it is usual in the family."""
    default = DEFAULTS[config["model_type"]].get("layer_types")
    listed, pattern = config.get("layer_types"), config.get("hybrid_override_pattern")
    if pattern and (listed is None or listed is default):
        listed = pattern
    if not listed:
        is_full, other = usual_kinds(config, family)
        listed = [FULL if is_full(number) else other for number in range(config["num_hidden_layers"])]
    kinds = [KINDS.get(each, each) for each in listed]
    if family.name == "gemma4" and kinds:
        kinds[-1] = FULL
    return kinds


def usual_kinds(config: Mapping[str, Any], family: Family) -> tuple[Callable[[int], bool], str]:
    """The layers that attend to the whole text if a configuration does not list them, and the kind of the others."""
    if family.state is State.DELTA_RULE:
        if family.is_latent:
            numbers = config.get("linear_full_attn_layers") or range(5, config["num_hidden_layers"] + 1, 4)
            return lambda number: number + 1 in numbers, LINEAR
        return every(config["full_attention_interval"]), LINEAR
    if family.state is State.CONVOLUTION:
        chosen = config.get("full_attn_idxs")
        return lambda number: chosen is None or number in chosen, "conv"
    if family.state is State.STATE_SPACE:
        chosen = config.get("attn_layer_indices") or ()
        return lambda number: family.has_both or number in chosen, LINEAR
    if not uses_window(config) or not config.get("sliding_window"):
        return lambda _: True, SLIDING
    if family.plain_every:
        rotates = config.get("no_rope_layers") or rotated_layers(config)
        return lambda number: bool(rotates[number]), SLIDING
    first = config["max_window_layers"]
    if family.name == "qwen2moe":
        return lambda number: number % 2 == 1 or number >= first, SLIDING
    if family.name in ("qwen2", "qwen3"):
        return lambda number: bool(number < first), SLIDING
    pattern = config.get("sliding_window_pattern")
    period = pattern if isinstance(pattern, int) else family.window_every
    return every(period) if period else lambda _: False, SLIDING


def every(period: int) -> Callable[[int], bool]:
    """A test of a layer's number: whether it is the last of each `period` layers."""
    return lambda number: (number + 1) % period == 0


def rotated_layers(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer encodes positions, which the last of each `no_rope_layer_interval` layers does not."""
    is_plain = every(config["no_rope_layer_interval"])
    return [not is_plain(number) for number in range(config["num_hidden_layers"])]


def own_numbers(config: Mapping[str, Any], family: Family) -> dict[int, Mapping[str, Any]]:
    """The differing values of single layers, by their numbers."""
    if family.name != "gemma4" or "per_layer_config" in config:
        return {int(number): own for number, own in (config.get("per_layer_config") or {}).items()}
    own = {"head_dim": config["global_head_dim"]}
    if config["attention_k_eq_v"] and (heads := config.get("num_global_key_value_heads")) is not None:
        own["num_key_value_heads"] = heads
    return {number: own for number, kind in enumerate(config["layer_types"]) if kind == FULL}


def positions(given: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """How positions are encoded, for all layers or by the kind of layer."""
    named = given.get("rope_scaling") or config.get("rope_parameters") or {}
    is_nested = any(isinstance(value, Mapping) for value in named.values())
    if not is_nested and (family.local_base is not None or (family.name == "olmo2" and config.get("sliding_window"))):
        local = given.get("rope_local_base_freq") or family.local_base or DEFAULTS[config["model_type"]]["rope_theta"]
        named = {SLIDING: {"rope_theta": local}, FULL: named}
    elif not is_nested:
        return scaled(named, config)
    return {kind: scaled(parameters, config) for kind, parameters in named.items() if isinstance(parameters, Mapping)}


def scaled(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary table's numbers by today's names."""
    found = {"rope_theta": config["rope_theta"], **parameters}
    if (share := config.get("partial_rotary_factor")) is not None:
        found.setdefault("partial_rotary_factor", share)
    kind = found.get("rope_type") or found.get("type") or "default"
    found["rope_type"] = "longrope" if config["model_type"] == "phi3" and kind in OLD_LONGROPE else kind
    if found["rope_type"] in WITH_ORIGINAL:
        own = "original_max_position_embeddings"
        if own in DEFAULTS[config["model_type"]]:
            found[own] = config[own]
        found.setdefault(own, config["max_position_embeddings"])
    return found
