"""Reads a checkpoint's configuration. Names are those of transformers' configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.verify.model.architecture.description import Activation, Architecture, Layer, Mixture, Rotary
from outrider.verify.model.architecture.families import FAMILIES, Family
from outrider.verify.model.architecture.rotary import is_known

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


def read_config(config: Any) -> Architecture | None:
    """The decoder of a configuration; None if its family is not known, or if it has what the family does not."""
    family = FAMILIES.get(config.model_type)
    if family is None or getattr(config, "use_bidirectional_attention", False):
        return None
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    hidden = config.hidden_size
    rotaries, numbers = read_rotaries(config)
    if name not in ACTIVATIONS or not all(map(is_known, rotaries)):
        return None
    found = Architecture(
        name=family.name,
        hidden=hidden,
        vocabulary=config.vocab_size,
        layers=tuple(read_layer(config, family, number, numbers) for number in range(config.num_hidden_layers)),
        rotaries=tuple(rotaries),
        context_tokens=config.max_position_embeddings,
        epsilon=first(config, "rms_norm_eps", "layer_norm_eps", "norm_eps"),
        norm=family.norm,
        activation=family.activation if family.activation is Activation.CLAMPED_SILU else ACTIVATIONS[name],
        mixture=read_mixture(config, family),
        clamp=(getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)),
        turns_experts=family.turns_experts,
        is_parallel=family.is_parallel,
        norms_after_attention=family.norms_after_attention,
        embedding_scale=float(hidden**0.5) if family.scales_embeddings else getattr(config, "embedding_multiplier", 1.0),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        logit_scale=getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        has_pairs=family.pairs_in_checkpoints,
        norms_less_one=family.norms_less_one,
    )
    return found


def read_mixture(config: Any, family: Family) -> Mixture | None:
    """The mixtures of experts; None if there are none."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((each for name in counts if (each := getattr(config, name, None))), None)
    if not count:
        return None
    normalizes = getattr(config, "norm_topk_prob", False) if family.normalizes is None else family.normalizes
    return Mixture(
        experts=count,
        used=first(config, "num_experts_per_tok", "moe_k"),
        scores=family.scores,
        normalizes=normalizes,
        scale=getattr(config, "routed_scaling_factor", 1.0),
        groups=getattr(config, "n_group", None) or 1,
        used_groups=getattr(config, "topk_group", None) or 1,
    )


def read_layer(config: Any, family: Family, number: int, numbers: Mapping[str | None, int]) -> Layer:
    """One layer; `numbers` are those of the rotary tables by the kind of layer."""
    heads = config.num_attention_heads
    width = head_width(config)
    kind = kind_of(config, number)
    scale = getattr(config, "query_pre_attn_scalar", None) or width
    rotated = family.rotates_all or kind == "sliding_attention" or not config.sliding_window
    if (plain := getattr(config, "no_rope_layers", None)) is not None:
        rotated = bool(plain[number])
    return Layer(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=width,
        scaling=getattr(config, "attention_multiplier", None) or float(scale) ** -0.5,
        window=config.sliding_window if kind == "sliding_attention" else None,
        rotary=numbers.get(kind, numbers.get(None)) if rotated else None,
        cap=getattr(config, "attn_logit_softcapping", None),
    )


def kind_of(config: Any, number: int) -> str:
    """The kind of a layer, as `layer_types` names it."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return str(kinds[number])
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def read_rotaries(config: Any) -> tuple[list[Rotary], dict[str | None, int]]:
    """The rotary tables, and their numbers by kind of layer; None is any kind."""
    given = config.rope_parameters
    by_kind = {None: given} if "rope_theta" in given else given
    width = head_width(config)
    tables: list[Rotary] = []
    numbers: dict[str | None, int] = {}
    for kind, parameters in by_kind.items():
        size = int(width * parameters.get("partial_rotary_factor", 1.0))
        scaling = {name: value for name, value in parameters.items() if value is not None}
        table = Rotary(size, scaling["rope_theta"], scaling, config.max_position_embeddings)
        if table not in tables:
            tables.append(table)
        numbers[kind] = tables.index(table)
    return tables, numbers


def head_width(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def first(config: Any, *names: str) -> Any:
    """The first of these that the configuration has."""
    return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)
