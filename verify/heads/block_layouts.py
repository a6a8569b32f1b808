"""Reads the config.json of block heads: the layouts of the libraries speculators 0.9 and dflash 0.1."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from outrider.drafters.interface import MAX_NODES
from outrider.verify.errors import ModelError
from outrider.verify.heads.blocks import BlockHead, BlockShape
from outrider.verify.model.attention.interface import NAME

# In the layout of speculators by name; in that of dflash by the class that computes it.
KINDS, CLASSES = ("dflash", "dflash2", "dspark"), ("DFlashDraftModel", "DFlash2DraftModel")
# The window of layers that name none, in which a causal mask remains.
NO_WINDOW = 1 << 30


def is_block_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a block head."""
    is_named = any(name in CLASSES for name in config.get("architectures") or ())
    return config.get("speculators_model_type") in KINDS or is_named or "dflash_config" in config


def new_block_head(config: Mapping[str, Any], depth: int, vocabulary: int, has_bias: bool, path: str) -> BlockHead:
    """The network that a config.json describes, for a target with `depth` layers and `vocabulary` logits. Raises ModelError."""
    is_speculators = "speculators_model_type" in config
    given = dict(config["transformer_layer_config"] if is_speculators else config)
    found = AutoConfig.for_model(str(given.pop("model_type", "qwen3")), **{**given, "attention_bias": has_bias})
    rope = found.rope_parameters or {}
    found.rope_parameters = rope.get("sliding_attention", rope)
    shape = read_speculators(config, depth) if is_speculators else read_dflash(config, depth)
    set_windows(found, shape)
    found._attn_implementation = NAME
    if not 1 <= shape.drafted <= shape.rows <= MAX_NODES:
        raise ModelError(f"The head at {path!r} drafts blocks of {shape.rows} rows; at most {MAX_NODES} are supported.")
    if not all(0 <= layer < depth for layer in shape.layers_read):
        layers = ", ".join(map(str, shape.layers_read))
        raise ModelError(
            f"The head at {path!r} reads the inputs of layers {layers}, and this target has {depth} layers; use the head of"
            " this target, or one that does not read its last hidden state."
        )
    return BlockHead(found, shape, vocabulary)


def read_speculators(config: Mapping[str, Any], depth: int) -> BlockShape:
    """The layout of speculators. Raises KeyError if a value is missing."""
    kind, own = config["speculators_model_type"], config.get("draft_vocab_size")
    shape = BlockShape(
        layers_read=tuple(config.get("aux_hidden_state_layer_ids") or (2, depth // 2, depth - 3)),
        rows=int(config.get("block_size", 8)),
        mask_token=int(config["mask_token_id"]),
        from_anchor=bool(config.get("sample_from_anchor", kind == "dspark")),
        windows_both_ways=bool(config.get("sliding_window_non_causal", kind == "dflash2")),
        anchored_windows=True,
        draft_vocabulary=None if own in (None, config["vocab_size"]) else int(own),
    )
    if kind == "dflash2":
        return with_dflash2(shape, {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256} | dict(config))
    if kind == "dspark":
        rank, reads_both = int(config.get("markov_rank", 256)), config.get("confidence_head_with_markov", True)
        confidence = ("both" if reads_both else "states") if config.get("enable_confidence_head", True) else ""
        markov = (rank, str(config.get("markov_head_type", "vanilla"))) if rank else None
        return replace(shape, markov=markov, confidence=confidence)
    return shape


def read_dflash(config: Mapping[str, Any], depth: int) -> BlockShape:
    """The layout of dflash, whose layers are numbered by their outputs. Raises KeyError if a value is missing."""
    known = {**config, **(config.get("dflash_config") or {})}
    count, layers = int(config["num_hidden_layers"]), known.get("target_layer_ids")
    if layers is None:
        last = int(config.get("num_target_layers", depth)) - 3
        layers = [(last + 3) // 2] if count == 1 else [round(1 + place * (last - 1) / (count - 1)) for place in range(count)]
    is_causal = config.get("is_causal")
    shape = BlockShape(
        layers_read=tuple(layer + 1 for layer in layers),
        rows=int(known.get("block_size", 16)),
        mask_token=int(known["mask_token_id"]),
        full_both_ways=not is_causal,
        windows_both_ways=is_causal is False,
        embedding_scale=float(known.get("input_embedding_scale", 1.0)),
        logit_scale=float(known.get("output_multiplier", 1.0)),
        softcap=max(0.0, float(known.get("final_logit_softcapping") or 0)),
    )
    return with_dflash2(shape, known) if "selector_rank" in known else shape


def with_dflash2(shape: BlockShape, known: Mapping[str, Any]) -> BlockShape:
    convolution = (int(known["conv_kernel_size"]), int(known["conv_group_size"]))
    return replace(shape, convolution=convolution, selector=(int(known["selector_rank"]), int(known.get("selector_top_k", 16))))


def set_windows(config: PreTrainedConfig, shape: BlockShape) -> None:
    """Counts the windows of layers in a row's own position and those before it, as `Layer.window` does."""
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        config.sliding_window = (config.sliding_window or NO_WINDOW) + shape.anchored_windows
