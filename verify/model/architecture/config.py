"""Reads a checkpoint's configuration. Names are those of transformers' configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

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
RECURRENT, FEED_FORWARD = ("linear_attention", "mamba", "conv"), ("mlp", "moe")


def read_config(config: Any) -> Architecture | None:
    """The decoder of a configuration; None if its family is not known, or if it has what the family does not."""
    family = FAMILIES.get(config.model_type)
    if family is None or getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        return None
    if getattr(config, "altup_active_idx", 0) or not getattr(config, "altup_correct_scale", True):
        return None
    name = first_of(config, "hidden_activation", "mlp_hidden_act", "hidden_act") or "silu"
    hidden = config.hidden_size
    rotaries, numbers = read_rotaries(config, family)
    if name not in ACTIVATIONS or not all(map(is_known, rotaries)) or getattr(config, "moe_latent_size", None):
        return None
    found = Architecture(
        name=family.name,
        hidden=hidden,
        vocabulary=config.vocab_size,
        layers=tuple(read_layer(config, family, number, numbers) for number in range(config.num_hidden_layers)),
        embedding_width=getattr(config, "hidden_size_per_layer_input", None) or 0,
        rotaries=tuple(rotaries),
        context_tokens=getattr(config, "max_position_embeddings", MOST_TOKENS),
        epsilon=first(config, "rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"),
        norm=family.norm,
        activation=family.activation if family.activation is Activation.CLAMPED_SILU else ACTIVATIONS[name],
        mixture=read_mixture(config, family),
        clamp=(getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)),
        turns_experts=family.turns_experts,
        is_parallel=family.is_parallel,
        norms_after_attention=family.norms_after_attention,
        embedding_scale=float(hidden**0.5) if family.scales_embeddings else getattr(config, "embedding_multiplier", 1.0),
        residuals=getattr(config, "altup_num_inputs", 0),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        logit_scale=first_of(config, "logit_scale", "lm_head_multiplier") or 1 / getattr(config, "logits_scaling", 1.0),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        has_pairs=getattr(config, "rope_interleave", family.pairs_in_checkpoints),
        norms_less_one=family.norms_less_one,
        decays_as_logarithms=True,
        multipliers=read_multipliers(config),
    )
    return found


def read_mixture(config: Any, family: Family) -> Mixture | None:
    """The mixtures of experts; None if there are none."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count, used = first_of(config, *counts), first_of(config, "num_experts_per_tok", "moe_k", "top_k_experts")
    if not (count and used and getattr(config, "enable_moe_block", True)):
        return None
    normalizes = getattr(config, "norm_topk_prob", False) if family.normalizes is None else family.normalizes
    groups = None if getattr(config, "topk_method", None) == "greedy" else getattr(config, "n_group", None)
    return Mixture(
        experts=count,
        used=used,
        scores=family.scores,
        normalizes=normalizes,
        scale=getattr(config, "routed_scaling_factor", 1.0),
        groups=groups or 1,
        used_groups=getattr(config, "topk_group", None) or 1,
        summed=summed(family.scores),
    )


def read_layer(config: Any, family: Family, number: int, numbers: Mapping[str | None, int]) -> Layer:
    """One layer; `numbers` are those of the rotary tables by the kind of layer."""
    kind = kind_of(config, number)
    if kind in FEED_FORWARD:
        return Layer()
    recurrence = read_recurrence(config, family) if family.has_both or kind in RECURRENT else None
    if kind in RECURRENT:
        return Layer(recurrence=recurrence, feeds=family.feeds)
    if family.is_latent:
        return read_latent(config, numbers)
    own = own_sizes(config, number)
    heads, width = own.num_attention_heads, head_width(own)
    scale = getattr(config, "query_pre_attn_scalar", None) or width
    rotated = family.rotates_all or kind == "sliding_attention" or not config.sliding_window
    if getattr(config, "position_embedding_type", "rope") != "rope":
        rotated = False
    if (plain := getattr(config, "no_rope_layers", None)) is not None:
        rotated = bool(plain[number])
    sparsity = getattr(config, "activation_sparsity_pattern", None) or [0.0] * config.num_hidden_layers
    first_shared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return Layer(
        heads=heads,
        kv_heads=getattr(own, "num_key_value_heads", None) or heads,
        head_dim=width,
        scaling=family.scaling or getattr(config, "attention_multiplier", None) or float(scale) ** -0.5,
        window=config.sliding_window if kind == "sliding_attention" else None,
        rotary=numbers.get(kind, numbers.get(None)) if rotated else None,
        cap=getattr(config, "attn_logit_softcapping", None),
        is_gated=family.gates_attention,
        norms_values=family.norms_values,
        deviations=NormalDist().inv_cdf(sparsity[number]) if sparsity[number] > 0 else -math.inf,
        source=source_of([kind_of(config, each) for each in range(number + 1)], first_shared),
        recurrence=recurrence,
        feeds=family.feeds,
    )


def read_latent(config: Any, numbers: Mapping[str | None, int]) -> Layer:
    """A layer of latent attention."""
    known = Latent(config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank or 0)
    return Layer(
        heads=config.num_attention_heads,
        kv_heads=1,
        head_dim=known.rank + config.qk_rope_head_dim,
        scaling=latent_scaling(known.key_dim + config.qk_rope_head_dim, config.rope_parameters),
        rotary=numbers[None],
        latent=known,
    )


def read_recurrence(config: Any, family: Family) -> Recurrence:
    """The mixer of recurrent layers."""
    assert family.state is not None
    if family.state is State.CONVOLUTION:
        return Recurrence(family.state, config.conv_L_cache - 1)
    if family.state is State.DELTA_RULE:
        return Recurrence(
            family.state,
            config.linear_conv_kernel_dim - 1,
            heads=config.linear_num_value_heads,
            key_heads=config.linear_num_key_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            gates_first=False,
        )
    least = getattr(config, "time_step_min", 0.0) if family.name.startswith("nemotron_h") else 0.0
    return Recurrence(
        family.state,
        first(config, "mamba_d_conv", "conv_kernel") - 1,
        heads=first(config, "mamba_n_heads", "mamba_num_heads", "num_heads"),
        key_heads=first(config, "mamba_n_groups", "n_groups"),
        key_dim=first(config, "mamba_d_state", "ssm_state_size", "state_size"),
        value_dim=first(config, "mamba_d_head", "mamba_head_dim", "head_dim"),
        gates_first=not getattr(config, "mamba_norm_before_gate", False),
        steps=(least, math.inf) if least else tuple(getattr(config, "time_step_limit", (0.0, math.inf))),
    )


def read_multipliers(config: Any) -> dict[str, float]:
    """What Falcon-H1's linear layers are multiplied by."""
    if not hasattr(config, "ssm_multipliers"):
        return {}
    gate, down = config.mlp_multipliers
    given, attention = config.ssm_in_multiplier, config.attention_in_multiplier
    names = ("state gate", "values", "keys", "queries", "step")
    return {
        "query": attention,
        "key": attention * config.key_multiplier,
        "value": attention,
        "output": config.attention_out_multiplier,
        "gate": gate,
        "down": down,
        "state output": config.ssm_out_multiplier,
        **{name: given * each for name, each in zip(names, config.ssm_multipliers, strict=True)},
    }


def own_sizes(config: Any, number: int) -> Any:
    """The configuration with a layer's own sizes, where layers differ."""
    return config.per_layer_config[number] if getattr(config, "is_heterogeneous", False) else config


def kind_of(config: Any, number: int) -> str:
    """The kind of a layer, as `layer_types` names it."""
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    if kinds:
        return str(kinds[number])
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def read_rotaries(config: Any, family: Family) -> tuple[list[Rotary], dict[str | None, int]]:
    """The rotary tables, and their numbers by kind of layer; None is any kind."""
    given = getattr(config, "rope_parameters", None)
    if not given or not family.encodes_positions:
        return [], {}
    by_kind = {None: given} if "rope_theta" in given else given
    kinds = [kind_of(config, number) for number in range(config.num_hidden_layers)]
    tables: list[Rotary] = []
    numbers: dict[str | None, int] = {}
    for kind, parameters in by_kind.items():
        width = head_width(own_sizes(config, kinds.index(kind) if kind in kinds else 0))
        is_partial = parameters.get("rope_type") != "proportional"
        size = int(width * parameters.get("partial_rotary_factor", 1.0)) if is_partial else width
        scaling = {name: value for name, value in parameters.items() if value is not None}
        table = Rotary(size, scaling["rope_theta"], scaling, config.max_position_embeddings)
        if table not in tables:
            tables.append(table)
        numbers[kind] = tables.index(table)
    return tables, numbers


def head_width(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def first_of(config: Any, *names: str) -> Any:
    """The first of these that the configuration has; None without any."""
    return next((each for name in names if (each := getattr(config, name, None))), None)


def first(config: Any, *names: str) -> Any:
    """The first of these that the configuration has."""
    return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)
