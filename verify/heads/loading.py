"""Loads draft heads: EAGLE, EAGLE-3 and blocks from checkpoints, MTP layers from the target's checkpoint or file."""

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.utils import cached_file

from outrider.verify.checkpoint import DEFAULT_REVISION, MTP, locate
from outrider.verify.errors import ModelError, first_sentence, loading
from outrider.verify.heads.assistant import AssistantHead, AssistantModel, layers_read, new_assistant
from outrider.verify.heads.block_model import BlockModel
from outrider.verify.heads.blocks import BlockHead, new_block_head
from outrider.verify.heads.chain import ChainedHeads
from outrider.verify.heads.kinds import Kind, find_head
from outrider.verify.heads.model import HeadModel, Target
from outrider.verify.heads.mtp import load_mtp
from outrider.verify.heads.networks import Eagle3Head, EagleHead, Head
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.runner import ModelRunner

FILES = ("model.safetensors", "pytorch_model.bin")
# What precedes names of an assistant's weights.
PREFIX = re.compile(r"^(model|masked_embedding)\.")
# EAGLE-3's own names of layers: without a number if there is one.
MIDDLE = re.compile(r"^midlayer\.(?:(\d+)\.)?")


def load_head(path: str, target: ModelRunner, revision: str = DEFAULT_REVISION, pack: bool = True) -> HeadModel | None:
    """The head at `path` for a target that has not started; None if there is no head but a model. Raises ModelError.

    For MTP, `revision` is the target's.
    """
    if path == MTP:
        known = with_hidden_states(target, path)
        with loading("The multi-token prediction layer"):
            heads = load_mtp(known, revision)
        return HeadModel(heads[0], known, pack) if len(heads) == 1 else ChainedHeads(heads, known, pack)
    found = find_head(path, revision)
    if found is None:
        return None
    kind, config = found
    if kind == Kind.MEDUSA:
        raise ModelError(f"The heads at {path!r} are Medusa's, which are not supported; use an EAGLE head or a draft model.")
    model, build = MODELS[kind]
    try:
        weights = read_weights(locate(path, revision).source, revision)
        if kind == Kind.ONE_LAYER and "fc.weight" not in weights:
            return None
        known = with_hidden_states(target, path)
        return cast(HeadModel, model(build(config, weights, known, path), known, pack))
    except ModelError:
        raise
    except Exception as error:  # whatever damaged files and unknown layouts raise
        raise ModelError(
            f"The head at {path!r} cannot be loaded ({type(error).__name__}: {first_sentence(error)});"
            " download it again, or use another head or a draft model."
        ) from None


def with_hidden_states(target: ModelRunner, path: str) -> Target:
    """The target, whose hidden states the head at `path` reads. Raises ModelError if it has none."""
    if isinstance(target, Target):
        return target
    raise ModelError(
        f"The head {path!r} reads hidden states, which llama.cpp does not give; use a draft model, or leave out model.backend."
    )


def read_weights(source: str, revision: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in one file, the first of FILES that exists; none if it has none of them."""
    for name in FILES:
        file = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            is_safe = name.endswith("safetensors")
            found = load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
            return cast("dict[str, torch.Tensor]", found)
    return {}


def build_eagle(config: dict[str, Any], weights: dict[str, torch.Tensor], target: Target, path: str) -> EagleHead:
    """An EAGLE head with its weights. Raises ModelError."""
    check_size(weights, 2, target, path)
    head = EagleHead(layer_config(config, weights), bias="fc.bias" in weights)
    load_weights(head, weights, path)
    return head


def build_eagle3(config: dict[str, Any], weights: dict[str, torch.Tensor], target: Target, path: str) -> Eagle3Head:
    """An EAGLE-3 head with its weights. Raises ModelError."""
    count = target.depth
    if count is None:
        raise ModelError("EAGLE-3 heads are not supported for this target's architecture; use a draft model.")
    named = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    layers = tuple(named or (2, count // 2, count - 3))
    check_size(weights, len(layers), target, path)
    if not all(0 <= layer < count for layer in layers):
        raise ModelError(f"The head at {path!r} reads layers that the target does not have; use the head of this target.")
    weights = {MIDDLE.sub(lambda found: f"layers.{found[1] or 0}.", name): each for name, each in weights.items()}
    vocabulary = len(weights.get("lm_head.weight", ()))
    weights.setdefault("d2t", torch.zeros(vocabulary, dtype=torch.int64))
    head = Eagle3Head(
        layer_config(config | {"vocab_size": target.vocabulary}, weights),
        layers,
        target.hidden,
        vocabulary,
        bool(config.get("norm_before_residual")),
    )
    load_weights(head, weights, path)
    check_vocabulary(head.d2t, target, path)
    return head


def build_block(config: dict[str, Any], weights: dict[str, torch.Tensor], target: Target, path: str) -> BlockHead:
    """A block head with its weights. Raises ModelError."""
    if target.depth is None:
        raise ModelError("Block heads are not supported for this target's architecture; use a draft model.")
    has_bias = any(name.endswith("q_proj.bias") for name in weights)
    head = new_block_head(config, target.depth, target.vocabulary, has_bias, path)
    check_size(weights, len(head.layers_read), target, path)
    load_weights(head, {name.replace("codebook.weight", "codebook"): tensor for name, tensor in weights.items()}, path)
    if head.shape.draft_vocabulary is not None:
        check_vocabulary(head.d2t, target, path)
    return head


def build_assistant(config: dict[str, Any], weights: dict[str, torch.Tensor], target: Target, path: str) -> AssistantHead:
    """An assistant of Gemma 4 with its weights. Raises ModelError."""
    if target.in_pages:
        raise ModelError(f"The assistant {path!r} drafts on a CPU only; set model.device to cpu, or use a draft model.")
    weights = {PREFIX.sub("", name): tensor for name, tensor in weights.items()}
    check_size(weights, 2, target, path, "pre_projection.weight")
    scale = target.decoder.architecture.embedding_scale if isinstance(target, NativeRunner) else 1.0
    head = new_assistant(config, scale)
    widths = {kind: layer.key_dim for kind, (_, layer) in layers_read(target).items()}
    if not head.key_dims.items() <= widths.items() or head.vocabulary != target.vocabulary:
        raise ModelError(f"The assistant {path!r} does not fit this target; use the assistant of this target.")
    load_weights(head, weights, path)
    return head


MODELS: dict[Kind, tuple[type[Any], Callable[..., Head]]] = {
    Kind.ASSISTANT: (AssistantModel, build_assistant),
    Kind.BLOCK: (BlockModel, build_block),
    Kind.EAGLE3: (HeadModel, build_eagle3),
    Kind.EAGLE: (HeadModel, build_eagle),
    Kind.ONE_LAYER: (HeadModel, build_eagle),
}


def check_vocabulary(d2t: Any, target: Target, path: str) -> None:
    """Raises ModelError unless the target has all tokens of a head; `d2t` [own vocabulary] is their ids less the own ones."""
    drafted = torch.arange(len(d2t)) + d2t
    if int(drafted.min()) < 0 or int(drafted.max()) >= target.vocabulary:
        raise ModelError(f"The head at {path!r} drafts tokens that the target does not have; use the head of this target.")


def layer_config(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> LlamaConfig:
    has_bias = any(name.startswith("layers.0.self_attn.") and name.endswith(".bias") for name in weights)
    found = LlamaConfig(**{**config, "model_type": "llama", "attention_bias": has_bias})
    found._attn_implementation = NAME
    return found


def load_weights(head: torch.nn.Module, weights: dict[str, torch.Tensor], path: str) -> None:
    """Copies the weights into the head; a bias that is absent is zero. Raises ModelError."""
    expected = head.state_dict()
    absent = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if name.endswith(".bias")}
    found = absent | {name: tensor for name, tensor in weights.items() if name in expected}
    wrong = sorted(name for name in expected if name not in found or found[name].shape != expected[name].shape)
    wrong += sorted(name for name, tensor in found.items() if tensor.is_floating_point() and tensor.itemsize < 2)
    if wrong:
        raise ModelError(
            f"The head at {path!r} is not in a supported layout: {wrong[0]} is missing, quantised, or has another shape."
        )
    head.load_state_dict(found)


def check_size(weights: dict[str, torch.Tensor], parts: int, target: Target, path: str, name: str = "fc.weight") -> None:
    """Raises ModelError unless a head's first layer reads `parts` vectors as wide as the target's hidden states."""
    if name not in weights:
        raise ModelError(f"There are no weights of a head at {path!r}; it must have them in {' or '.join(FILES)}.")
    found = weights[name].shape[1]
    size = target.hidden
    if found != parts * size:
        raise ModelError(
            f"The head at {path!r} reads {found} values per token, and this target gives {parts} times {size};"
            " use the head of this target."
        )
