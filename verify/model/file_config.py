"""transformers' configuration of a GGUF file: of the family whose configuration describes the same decoder.

transformers itself reads few architectures from files, and not all that files say about them.
"""

import math
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture, Layer, Recurrence, Rotary, Scores, State
from outrider.verify.model.architecture.families import FAMILIES, Family
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.architecture.standard import FULL, LINEAR, NAMES, SLIDING
from outrider.verify.model.cpu.native.loading import Source
from outrider.verify.model.experts import expert_name
from outrider.verify.model.stored import Stored

# Standard names by those of fields of configurations.
STANDARD = {field: name for name, known in NAMES.items() for field in known}
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
# What is not about the decoder, but about how its weights are stored.
OF_FILES = (
    "name",
    "context_tokens",
    "has_pairs",
    "norms_less_one",
    "decays_as_logarithms",
    "turns_experts",
    "multipliers",
    "rotaries",
)


def config_of(source: Source) -> Any | None:
    """The configuration; None if no family's describes the file."""
    for name, family in FAMILIES.items():
        if family.name == source.known.name and (found := of_family(name, family, source)) is not None:
            return found
    return None


def of_family(name: str, family: Family, source: Source) -> Any | None:
    """The configuration of this `model_type`; None if it describes another decoder."""
    try:
        config = configuration(name, family, source)
        own, config.dtype = read_config(config.to_dict()), torch.bfloat16
    except (ValueError, TypeError, KeyError, StrictDataclassError):  # numbers that this family does not have
        return None
    return config if own is not None and is_same(own, source.known) else None


def configuration(name: str, family: Family, source: Source) -> Any:
    """The configuration of this `model_type` with the numbers of the file."""
    kind, values = CONFIG_MAPPING[name], numbers(family, source)
    names = {each: STANDARD.get(each, each) for each in signature(kind).parameters}
    return kind(**{each: values[standard] for each, standard in names.items() if standard in values})


def numbers(family: Family, source: Source) -> dict[str, Any]:
    """All numbers of a configuration, by standard names."""
    known, tensors = source.known, source.tensors
    layer = next((each for each in known.layers if each.heads), Layer())
    kinds = [kind_of(each, f"blk.{number}.ffn_gate_inp.weight" in tensors) for number, each in enumerate(known.layers)]
    dense = next((width for number in range(len(kinds)) if (width := inputs(tensors.get(f"blk.{number}.ffn_down.weight")))), 0)
    found = {
        "vocab_size": known.vocabulary,
        "hidden_size": known.hidden,
        "num_hidden_layers": len(known.layers),
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": known.context_tokens,
        "rms_norm_eps": known.epsilon,
        "layer_types": kinds,
        "sliding_window": max((each.window or 0 for each in known.layers), default=0) or None,
        "use_sliding_window": True,
        "attn_logit_softcapping": layer.cap,
        "final_logit_softcapping": known.logit_cap,
        "logit_scale": known.logit_scale,
        "logits_scaling": 1 / known.logit_scale,
        "embedding_multiplier": known.embedding_scale,
        "residual_multiplier": known.residual_scale,
        "attention_multiplier": layer.scaling,
        "query_pre_attn_scalar": round(layer.scaling**-2),
        "intermediate_size": dense,
        "rope_parameters": positions(family, known),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": sorted(source.ends),
        "bos_token_id": None,
        "pad_token_id": None,
        "attention_bias": any(f"blk.0.attn_{each}.bias" in tensors for each in ("q", "q_a", "kv_a_mqa")),
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }
    if (recurrence := next((each.recurrence for each in known.layers if each.recurrence), None)) is not None:
        found |= of_states(recurrence, known)
    if (latent := layer.latent) is not None:
        rotated = layer.head_dim - latent.rank
        found |= {"kv_lora_rank": latent.rank, "q_lora_rank": latent.query_rank or None, "qk_nope_head_dim": latent.key_dim}
        found |= {"qk_rope_head_dim": rotated, "v_head_dim": latent.value_dim, "num_key_value_heads": layer.heads}
        found["head_dim"] = rotated
    none = {"first_k_dense_replace": len(kinds)}
    return found | (none if known.mixture is None else of_experts(source, found))


def kind_of(layer: Layer, is_sparse: bool) -> str:
    """The kind of a layer, by the names of `layer_types`."""
    if layer.recurrence is not None and not layer.heads:
        return "conv" if layer.recurrence.kind is State.CONVOLUTION else LINEAR
    if not layer.heads:
        return "moe" if is_sparse else "mlp"
    return SLIDING if layer.window else FULL


def of_states(state: Recurrence, known: Architecture) -> dict[str, Any]:
    if state.kind is State.CONVOLUTION:
        return {"conv_L_cache": state.window + 1, "block_auto_adjust_ff_dim": False}
    inner, heads = state.heads * state.value_dim, [number for number, each in enumerate(known.layers) if each.heads]
    of_delta = {"conv_kernel_dim": state.window + 1, "num_value_heads": state.heads, "num_key_heads": state.key_heads}
    of_delta |= {"key_head_dim": state.key_dim, "value_head_dim": state.value_dim}
    return {
        **{f"linear_{name}": value for name, value in of_delta.items()},
        "conv_kernel": state.window + 1,
        "mamba_num_heads": state.heads,
        "mamba_head_dim": state.value_dim,
        "n_groups": state.key_heads,
        "state_size": state.key_dim,
        "mamba_d_ssm": inner,
        "mamba_expand": inner // known.hidden,
        "expand": inner // known.hidden,
        "mamba_norm_before_gate": not state.gates_first,
        "attn_layer_indices": heads,
        "time_step_min": state.steps[0],
        "time_step_limit": state.steps,
        **({} if heads else {"head_dim": state.value_dim}),
    }


def inputs(stored: Stored | None) -> int:
    return 0 if stored is None else stored.shape[-1]


def of_experts(source: Source, others: dict[str, Any]) -> dict[str, Any]:
    known, tensors, layers = source.known.mixture, source.tensors, range(len(source.known.layers))
    assert known is not None
    sparse = [f"blk.{number}.ffn_gate_inp.weight" in tensors for number in layers]
    first = sparse.index(True)
    width = inputs(tensors.get(expert_name(first, "down", 0)))
    shared = inputs(tensors.get(f"blk.{first}.ffn_down_shexp.weight"))
    return {
        "num_experts": known.experts,
        "num_experts_per_tok": known.used,
        "norm_topk_prob": known.normalizes,
        "routed_scaling_factor": known.scale,
        "n_group": known.groups,
        "topk_group": known.used_groups,
        "moe_intermediate_size": width,
        "intermediate_size": others["intermediate_size"] or width,
        **dict.fromkeys(SHARED, shared),
        "n_shared_experts": shared // width,
        "moe_num_shared_experts": shared // width,
        **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), first),
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "topk_method": "greedy" if known.groups == 1 else "group_limited_greedy",
        "use_expert_bias": True,
    }


def positions(family: Family, known: Architecture) -> dict[str, Any]:
    """The rotary tables, by the kind of layer if the family has several."""
    tables = [of_rotary(each, known) for each in known.rotaries]
    if family.local_base is None and all(each == tables[0] for each in tables):
        return tables[0] if tables else {}
    local = {"rope_type": "default", "rope_theta": family.local_base} if len(tables) < 2 else tables[1]
    return {FULL: tables[0], SLIDING: local}


def of_rotary(rotary: Rotary, known: Architecture) -> dict[str, Any]:
    layer = next((each for each in known.layers if each.heads), Layer())
    width = layer.head_dim if layer.latent is None else rotary.size
    scaling = {
        name: [*value] if isinstance(value, tuple) else value for name, value in rotary.scaling.items() if name != "divisors"
    }
    return {"rope_type": "default", **scaling, "rope_theta": rotary.base, "partial_rotary_factor": rotary.size / width}


def is_same(own: Architecture, known: Architecture) -> bool:
    """Whether two decoders compute the same. Frequencies of a single rotary table are taken from the file."""
    stored = {name: getattr(known, name) for name in OF_FILES}
    mixture = own.mixture
    if mixture is not None and mixture.scores is Scores.CHOSEN_SOFTMAX:  # whose weights are normalised anyway
        mixture = replace(mixture, normalizes=True)
    states = [each.recurrence and replace(each.recurrence, is_tiled=False) for each in known.layers]
    layers = tuple(replace(each, rotary=None, recurrence=state) for each, state in zip(known.layers, states, strict=True))
    own_layers = tuple(replace(each, rotary=None) for each in own.layers)
    plain = replace(known, layers=layers), replace(own, **stored, mixture=mixture, layers=own_layers)
    return (
        {*own.multipliers.values()} <= {1.0}
        and is_close(*plain)
        and is_close(*(tables(each, len(known.rotaries) == 1) for each in (own, known)))
    )


def tables(model: Architecture, is_single: bool) -> list[Any]:
    """The rotary table of each layer: its size and base, or its frequencies."""
    chosen = [None if each.rotary is None else model.rotaries[each.rotary] for each in model.layers]
    if is_single:
        return [each and (each.size, each.base) for each in chosen]
    found = [each and frequencies(each, 1) for each in chosen]
    return [each and ([*map(float, each[0])], float(each[1])) for each in found]


def is_close(left: Any, right: Any) -> bool:
    """Equality, but for the rounding of numbers in files."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-5)
    if is_dataclass(left) and is_dataclass(right):
        return all(is_close(getattr(left, each.name), getattr(right, each.name)) for each in fields(left))
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        return all(map(is_close, left, right))
    return bool(left == right)
