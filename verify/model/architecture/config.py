"""Reads a checkpoint's configuration. Names are those of `outrider.verify.model.architecture.standard`."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from outrider.verify.model.architecture.defaults import DEFAULTS
from outrider.verify.model.architecture.description import (
    Activation,
    Architecture,
    Latent,
    Layer,
    Mixture,
    Recurrence,
    Rotary,
    State,
    source_of,
)
from outrider.verify.model.architecture.families import FAMILIES, Family, summed
from outrider.verify.model.architecture.rotary import is_known, latent_scaling
from outrider.verify.model.architecture.standard import LINEAR, SLIDING, standard

# Of models that do not say how long texts may be.
MOST_TOKENS = 1 << 20
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
    "relu2": Activation.SQUARED_RELU,
}


# Kinds of layers, by the names of `layer_types`.
RECURRENT, FEED_FORWARD = (LINEAR, "conv"), ("mlp", "moe")


def read_config(given: Mapping[str, Any]) -> Architecture | None:
    """The decoder of a configuration; None if its family is not known, or if it has what the family does not.

    Raises ValueError for a size that is none, and what damaged files lead to.
    """
    family = FAMILIES.get(str(given.get("model_type")))
    if family is None or given.get("use_bidirectional_attention") in (True, "all"):
        return None
    config = standard(given)
    name = config["hidden_act"] or "silu"
    rotaries, numbers = read_rotaries(config, family)
    if config["altup_active_idx"] or not config["altup_correct_scale"] or config.get("moe_latent_size"):
        return None
    if name not in ACTIVATIONS or not all(map(is_known, rotaries)):
        return None
    sparsity = config.get("activation_sparsity_pattern") or ()
    config["deviations"] = [NormalDist().inv_cdf(share) if share > 0 else -math.inf for share in sparsity]
    if family.normalizes is not None:
        config["norm_topk_prob"] = family.normalizes
    return described(
        config,
        family,
        rotaries,
        numbers,
        activation=family.activation if family.activation is Activation.CLAMPED_SILU else ACTIVATIONS[name],
        turns_experts=family.turns_experts,
        has_pairs=config.get("rope_interleave", family.pairs_in_checkpoints),
        norms_less_one=family.norms_less_one,
        decays_as_logarithms=True,
        multipliers=read_multipliers(config) if family.has_both else {},
    )


def described(
    config: Mapping[str, Any], family: Family, rotaries: Sequence[Rotary], numbers: Mapping[str | None, int], **stored: Any
) -> Architecture:
    """The decoder with these numbers, by standard names; `stored` are fields about how its weights are stored.

    `numbers` are those of the rotary tables by the kind of layer; None is any kind.
    """
    hidden = config["hidden_size"]
    return Architecture(
        name=family.name,
        hidden=hidden,
        vocabulary=config["vocab_size"],
        layers=tuple(read_layer(config, family, number, numbers) for number in range(len(config["layer_types"]))),
        embedding_width=config["hidden_size_per_layer_input"] or 0,
        rotaries=tuple(rotaries),
        context_tokens=config["max_position_embeddings"] or MOST_TOKENS,
        epsilon=config["rms_norm_eps"],
        norm=family.norm,
        mixture=read_mixture(config, family),
        clamp=(config["swiglu_alpha"], config["swiglu_limit"]),
        is_parallel=family.is_parallel,
        norms_after_attention=family.norms_after_attention,
        embedding_scale=float(hidden**0.5) if family.scales_embeddings else config["embedding_multiplier"],
        residuals=config["altup_num_inputs"],
        residual_scale=config["residual_multiplier"],
        logit_scale=config.get("logit_scale") or config["lm_head_multiplier"] / config["logits_scaling"],
        logit_cap=config.get("final_logit_softcapping"),
        **stored,
    )


def read_mixture(config: Mapping[str, Any], family: Family) -> Mixture | None:
    count, used = config.get("num_experts"), config.get("num_experts_per_tok")
    if not (count and used and config["enable_moe_block"]):
        return None
    scores = config.get("scores", family.scores)
    return Mixture(
        experts=count,
        used=used,
        scores=scores,
        normalizes=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"],
        groups=1 if config.get("topk_method") == "greedy" else config["n_group"] or 1,
        used_groups=config["topk_group"] or 1,
        summed=summed(scores),
    )


def read_layer(config: Mapping[str, Any], family: Family, number: int, numbers: Mapping[str | None, int]) -> Layer:
    """One layer; `numbers` as in `described`."""
    kinds, kind = config["layer_types"], config["layer_types"][number]
    if kind in FEED_FORWARD:
        return Layer()
    recurrence = read_recurrence(config, family) if family.has_both or kind in RECURRENT else None
    if kind in RECURRENT:
        return Layer(recurrence=recurrence, feeds=family.feeds)
    if family.is_latent:
        return read_latent(config, family, numbers)
    own = own_sizes(config, number)
    heads, width, window = own["num_attention_heads"], head_width(own), config.get("sliding_window")
    scale = config.get("query_pre_attn_scalar") or width
    rotated = config["position_embedding_type"] == "rope" and (family.rotates_all or kind == SLIDING or not window)
    if (plain := config.get("no_rope_layers")) is not None:
        rotated = bool(plain[number])
    return Layer(
        heads=heads,
        kv_heads=own["num_key_value_heads"] or heads,
        head_dim=width,
        scaling=family.scaling or config.get("attention_multiplier") or float(scale) ** -0.5,
        window=window if kind == SLIDING else None,
        rotary=numbers.get(kind, numbers.get(None)) if rotated else None,
        cap=config.get("attn_logit_softcapping"),
        is_gated=family.gates_attention,
        norms_values=family.norms_values,
        deviations=config["deviations"][number] if config["deviations"] else -math.inf,
        source=source_of(kinds[: number + 1], len(kinds) - (config["num_kv_shared_layers"] or 0)),
        recurrence=recurrence,
        feeds=family.feeds or bool(own.get("feeds")),
    )


def read_latent(config: Mapping[str, Any], family: Family, numbers: Mapping[str | None, int]) -> Layer:
    known = Latent(config["kv_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"] or 0)
    rotary = config["qk_rope_head_dim"]
    return Layer(
        heads=config["num_attention_heads"],
        kv_heads=1,
        head_dim=known.rank + rotary,
        scaling=latent_scaling(known.key_dim + rotary, config["rope_parameters"] if family.encodes_positions else {}),
        rotary=numbers.get(None),
        latent=known,
    )


def read_recurrence(config: Mapping[str, Any], family: Family) -> Recurrence:
    assert family.state is not None
    if family.state is State.CONVOLUTION:
        return Recurrence(family.state, config["conv_L_cache"] - 1)
    if family.state is State.DELTA_RULE:
        return Recurrence(
            family.state,
            config["linear_conv_kernel_dim"] - 1,
            heads=config["linear_num_value_heads"],
            key_heads=config["linear_num_key_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            is_tiled=config.get("is_tiled", False),
            decay_dim=config["linear_key_head_dim"] if family.decays_rows else 1,
            activation=Activation.LOGISTIC if family.decays_rows else Activation.SILU,
            gates_first=False,
            reach=2.0 if config["linear_allow_neg_eigval"] else 1.0,
            epsilon=config["linear_norm_eps"],
        )
    least = config["time_step_min"] if family.name.startswith("nemotron_h") else 0.0
    return Recurrence(
        family.state,
        config["conv_kernel"] - 1,
        heads=config["mamba_num_heads"],
        key_heads=config["n_groups"],
        key_dim=config["state_size"],
        value_dim=config.get("mamba_head_dim") or config["head_dim"],
        gates_first=not config["mamba_norm_before_gate"],
        steps=(least, math.inf) if least else tuple(config["time_step_limit"]),
    )


def read_multipliers(config: Mapping[str, Any]) -> dict[str, float]:
    """The multipliers of Falcon-H1's linear layers."""
    default = DEFAULTS[config["model_type"]]
    gate, down = config["mlp_multipliers"] or default["mlp_multipliers"]
    given, attention = config["ssm_in_multiplier"], config["attention_in_multiplier"]
    names = ("state gate", "values", "keys", "queries", "step")
    scales = config["ssm_multipliers"] or default["ssm_multipliers"]
    return {
        "query": attention,
        "key": attention * config["key_multiplier"],
        "value": attention,
        "output": config["attention_out_multiplier"],
        "gate": gate,
        "down": down,
        "state output": config["ssm_out_multiplier"],
        **{name: given * each for name, each in zip(names, scales, strict=True)},
    }


def own_sizes(config: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The configuration with a layer's own sizes, where layers differ."""
    return {**config, **config["per_layer_config"].get(number, {})}


def read_rotaries(config: Mapping[str, Any], family: Family) -> tuple[list[Rotary], dict[str | None, int]]:
    """The rotary tables, and their numbers by kind of layer; None is any kind."""
    given, kinds = config["rope_parameters"], config["layer_types"]
    if not family.encodes_positions or given.get("rope_theta", 0) is None:
        return [], {}
    by_kind = {None: given} if "rope_theta" in given else given
    tables: list[Rotary] = []
    numbers: dict[str | None, int] = {}
    for kind, parameters in by_kind.items():
        width = head_width(own_sizes(config, kinds.index(kind) if kind in kinds else 0))
        is_partial = parameters.get("rope_type") != "proportional"
        size = int(width * parameters.get("partial_rotary_factor", 1.0)) if is_partial else width
        scaling = {name: value for name, value in parameters.items() if value is not None}
        table = Rotary(size, scaling["rope_theta"], scaling, config["max_position_embeddings"])
        if table not in tables:
            tables.append(table)
        numbers[kind] = tables.index(table)
    return tables, numbers


def head_width(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
