"""Reads the metadata of a GGUF file. Names of keys are those of llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.verify.model.architecture.description import (
    Activation,
    Architecture,
    Latent,
    Layer,
    Mixture,
    Recurrence,
    Rotary,
    Scores,
    State,
    source_of,
)
from outrider.verify.model.architecture.families import BY_FILE, Family, summed
from outrider.verify.model.architecture.rotary import is_known, latent_scaling

# Tensors that scale positions, by the name of their scaling.
DIVISORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


# llama.cpp's numbers of how scores are computed.
SCORES = {1: Scores.SOFTMAX, 2: Scores.SIGMOID, 3: Scores.CHOSEN_SOFTMAX}
# Whose files do not say that weights of experts are not normalised.
UNNORMALIZED = ("qwen2moe", "olmoe")


class Entries:
    """The entries of a file about its architecture, by keys without its name."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self.name = str(entries.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self._entries.get(f"{self.name}.{key}", default)

    def by_layer(self, key: str, layers: int, default: Any = None) -> list[Any]:
        """A value of each layer: files have one for all, or a list."""
        found = self.get(key, default)
        return list(found) if isinstance(found, list) else [found] * layers


def read_entries(given: Mapping[str, Any], vocabulary: int, vectors: Mapping[str, Any]) -> Architecture | None:
    """The decoder of a file; None if its family is not known. `vectors` are the tensors about positions, by name.

    Raises KeyError and TypeError for a file that lacks what it needs.
    """
    entries = Entries(given)
    family = BY_FILE.get(entries.name)
    if family is None or entries.get("altup.active_idx", 0):
        return None
    count, hidden = entries.get("block_count") - entries.get("nextn_predict_layers", 0), entries.get("embedding_length")
    rotaries = read_rotaries(entries, family, vectors) if family.encodes_positions else []
    if not all(map(is_known, rotaries)):
        return None
    epsilon = entries.get("attention.layer_norm_rms_epsilon") or entries.get("attention.layer_norm_epsilon")
    logit_scale = entries.get("logit_scale", 1.0)
    return Architecture(
        name=family.name,
        hidden=hidden,
        vocabulary=vocabulary,
        layers=tuple(
            read_latents(entries, family, count, rotaries)
            if family.is_latent
            else read_layers(entries, family, count, len(rotaries))
        ),
        rotaries=tuple(rotaries),
        context_tokens=entries.get("context_length"),
        epsilon=epsilon,
        norm=family.norm,
        activation=family.activation,
        mixture=read_mixture(entries, family),
        is_parallel=family.is_parallel,
        norms_after_attention=family.norms_after_attention,
        embedding_scale=float(hidden**0.5) if family.scales_embeddings else entries.get("embedding_scale", 1.0),
        embedding_width=entries.get("embedding_length_per_layer_input", 0),
        residuals=entries.get("altup.num_inputs", 0),
        residual_scale=entries.get("residual_scale", 1.0),
        # Granite's files have what logits are divided by, Cohere's what they are multiplied by.
        logit_scale=1 / logit_scale if family.name.startswith("granite") else logit_scale,
        logit_cap=entries.get("final_logit_softcapping", family.capped and family.capped[1]) or None,
        has_pairs=family.pairs_in_files,
    )


def read_mixture(entries: Entries, family: Family) -> Mixture | None:
    """The mixtures of experts; None if there are none."""
    count = entries.get("expert_count")
    if not count:
        return None
    normalizes = family.name not in UNNORMALIZED if family.normalizes is None else family.normalizes
    # Files of DeepSeek V2 say neither; some of GLM-4.7-Flash do not say the scores.
    has_sigmoids = family.is_latent and entries.get("expert_weights_norm")
    scores = SCORES.get(entries.get("expert_gating_func"), Scores.SIGMOID if has_sigmoids else family.scores)
    return Mixture(
        experts=count,
        used=entries.get("expert_used_count"),
        scores=scores,
        normalizes=entries.get("expert_weights_norm", normalizes),
        scale=entries.get("expert_weights_scale") or 1.0,
        groups=entries.get("expert_group_count") or 1,
        used_groups=entries.get("expert_group_used_count") or 1,
        summed=summed(scores),
    )


def head_width(entries: Entries, is_local: bool = False) -> int:
    heads = entries.by_layer("attention.head_count", 1)[0]
    own = entries.get("attention.key_length_swa") if is_local else None
    return int(own or entries.get("attention.key_length") or entries.get("embedding_length") // max(1, heads))


def read_layers(entries: Entries, family: Family, count: int, tables: int) -> list[Layer]:
    heads = entries.by_layer("attention.head_count", count)
    recurrent, feeds = read_recurrent(entries, family, count), entries.by_layer("feed_forward_length", count)
    kv_heads = entries.by_layer("attention.head_count_kv", count, heads)
    window, windowed = entries.get("attention.sliding_window"), read_pattern(entries, family, count)
    deviations = entries.by_layer("activation_sparsity_scale", count, -math.inf)
    first_shared = count - entries.get("attention.shared_kv_layers", 0)
    found: list[Layer] = []
    for number in range(count):
        recurrence = read_recurrence(entries, family) if recurrent[number] else None
        has_feed = family.feeds or bool(feeds[number])
        if not kv_heads[number] or (recurrence and not family.has_both):
            found.append(Layer(recurrence=recurrence, feeds=has_feed))
            continue
        is_local = bool(window and windowed[number])
        width = head_width(entries, is_local)
        scale = entries.get("embedding_length") // heads[0] if count == family.wide_scaling_at else width
        rotated = family.rotates_all or is_local or not window
        if family.plain_every:
            rotated = (number + 1) % family.plain_every != 0
        if entries.get("rope.scaling.finetuned") is False:
            rotated = False
        found.append(
            Layer(
                heads=heads[number],
                kv_heads=kv_heads[number],
                head_dim=width,
                scaling=family.scaling or entries.get("attention.scale") or scale**-0.5,
                window=window if is_local else None,
                rotary=(tables - 1 if is_local else 0) if rotated and tables else None,
                cap=entries.get("attn_logit_softcapping", family.capped and family.capped[0]) or None,
                is_gated=family.gates_attention,
                norms_values=family.norms_values,
                deviations=deviations[number],
                source=source_of(windowed[: number + 1], first_shared),
                recurrence=recurrence,
                feeds=has_feed,
            )
        )
    return found


def read_latents(entries: Entries, family: Family, count: int, rotaries: Sequence[Rotary]) -> list[Layer]:
    """Layers of latent attention, among which layers may keep a state.

    In older files, the widths of keys and values are those of heads, and not of latents.
    """
    key, value = (
        int(entries.get(f"attention.{part}_length_mla") or entries.get(f"attention.{part}_length")) for part in ("key", "value")
    )
    rotated = rotaries[0].size if rotaries else entries.get("rope.dimension_count")
    known = Latent(entries.get("attention.kv_lora_rank"), key - rotated, value, entries.get("attention.q_lora_rank") or 0)
    layer = Layer(
        heads=entries.get("attention.head_count"),
        kv_heads=1,
        head_dim=known.rank + rotated,
        scaling=latent_scaling(key, rotaries[0].scaling if rotaries else {}),
        rotary=0 if rotaries else None,
        latent=known,
    )
    recurrent = read_recurrent(entries, family, count)
    return [Layer(recurrence=read_recurrence(entries, family)) if each else layer for each in recurrent]


def read_recurrent(entries: Entries, family: Family, count: int) -> list[bool]:
    """The layers that keep a state."""
    if family.state is None or family.has_both:
        return [family.has_both] * count
    if family.state is State.DELTA_RULE and not family.is_latent:
        every = entries.get("full_attention_interval", 4)
        plain = [(number + 1) % every != 0 for number in range(count)]
        return list(entries.get("attention.recurrent_layers", plain))[:count]
    kv_heads = entries.by_layer("attention.head_count_kv", count, 0)
    feeds = entries.by_layer("feed_forward_length", count)
    return [not each and (family.feeds or not feed) for each, feed in zip(kv_heads, feeds, strict=False)]


def read_recurrence(entries: Entries, family: Family) -> Recurrence:
    """The mixer of recurrent layers."""
    assert family.state is not None
    if family.state is State.CONVOLUTION:
        return Recurrence(family.state, entries.get("shortconv.l_cache") - 1)
    if family.decays_rows:
        heads, width, window = (entries.get(key) for key in ("attention.head_count", "kda.head_dim", "ssm.conv_kernel"))
        sizes = {"heads": heads, "key_heads": heads, "key_dim": width, "value_dim": width, "decay_dim": width}
        return Recurrence(family.state, window - 1, **sizes, activation=Activation.LOGISTIC, gates_first=False)
    heads = entries.get("ssm.time_step_rank")
    return Recurrence(
        family.state,
        entries.get("ssm.conv_kernel") - 1,
        heads=heads,
        key_heads=entries.get("ssm.group_count"),
        key_dim=entries.get("ssm.state_size"),
        value_dim=entries.get("ssm.inner_size") // heads,
        is_tiled=family.tiles_in_files,
        gates_first=family.state is State.STATE_SPACE,
    )


def read_pattern(entries: Entries, family: Family, count: int) -> list[bool]:
    """The layers that have a window."""
    given = entries.get("attention.sliding_window_pattern", family.window_every)
    if isinstance(given, list):
        return [bool(each) for each in given]
    return [given is None or (number + 1) % given != 0 for number in range(count)]


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
