"""The forward of a decoder of Llama's kind in seven launches a layer, over the weights of a model of transformers.

A norm costs no launch: who writes the residual also writes it times the norm's gain, and parts of its sums of squares, by which
the next product divides its outputs. Queries and keys are rotated where keys are written, and gates and values become one
number where they are computed. All kernels give a row the same bits in any number of rows.

Takes decoders that norm with RMS before attention and before a feed-forward part of gates and values, and add both to the
residual: Llama, Mistral, Qwen2, Qwen3 and others; transformers' own forward computes all other models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Activation, Architecture, Layer, Norm
from outrider.verify.model.attention.interface import Layer as CacheLayer
from outrider.verify.model.gpu.projections import MergedLinear
from outrider.verify.model.gpu.triton_attention import KernelAttention, Rotation
from outrider.verify.model.gpu.triton_products import SUMMED, TYPES, Weights, embed, linear, linear_residual
from outrider.verify.model.hidden import HiddenTap
from outrider.verify.model.recurrent.rows import Recurrence

# The names of a layer's modules in transformers.
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION, OPTIONAL = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# The positions whose angles are computed at once.
ANGLES = 8192


class LayerWeights(NamedTuple):
    """One layer."""

    attention: CacheLayer
    rotates: bool
    gains: tuple[torch.Tensor | None, torch.Tensor | None]  # of the norms of query and key heads
    qkv: Weights
    o: Weights
    norm: torch.Tensor  # before the feed-forward part
    gate_up: Weights  # outputs take turns
    down: Weights


class Decoder:
    """A model's forward. Implements `outrider.verify.model.gpu.graphs.Forward`."""

    def __init__(self, model: PreTrainedModel, architecture: Architecture, angles: torch.Tensor, tap: HiddenTap | None) -> None:
        """`angles` as in `Rotation`. Use `decoder_of`."""
        decoder: Any = model.get_decoder()
        self._table, self._head = decoder.embed_tokens.weight, cast(Any, model.get_output_embeddings()).weights
        self._angles, self._epsilon, self._tap = angles, architecture.epsilon, tap
        layers = list(zip(decoder.layers, architecture.layers, strict=True))
        self._layers = [layer_weights(module, layer, number) for number, (module, layer) in enumerate(layers)]
        self._gains = [module.input_layernorm.weight for module, _ in layers] + [decoder.norm.weight]

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: KernelAttention, *, recurrence: Recurrence | None
    ) -> torch.Tensor:
        """Tokens and positions, int64 [N], to logits [N, V]."""
        epsilon, residuals = self._epsilon, []
        residual, rows, sums = embed(tokens, self._table, self._gains[0])
        for layer, gain in zip(self._layers, self._gains[1:], strict=True):
            residuals.append(residual)
            states = linear(rows, *layer.qkv, sums, epsilon)
            rotation = Rotation(self._angles, positions, *layer.gains, epsilon) if layer.rotates else None
            attended = attention.attend_states(layer.attention, states, rotation)
            residual, rows, sums = linear_residual(attended, *layer.o, residual, layer.norm)
            gated = linear(rows, *layer.gate_up, sums, epsilon, True)
            residual, rows, sums = linear_residual(gated, *layer.down, residual, gain)
        if self._tap is not None:
            self._tap.put([residuals[index] for index in self._tap.layers] or [normed(rows, sums, epsilon)])
        return cast(torch.Tensor, linear(rows, *self._head, sums, epsilon))


def decoder_of(model: PreTrainedModel, positions: int, tap: HiddenTap | None = None) -> Decoder | None:
    """The forward of the model over caches of up to `positions`; None if its architecture has other parts, or other weights."""
    if model.dtype not in TYPES or len({tensor.device for tensor in model.parameters()}) > 1:
        return None
    architecture = read_config(model.config.to_dict())
    decoder: Any = model.get_decoder()
    if architecture is None or not is_plain(architecture) or not all(has_parts(layer) for layer in decoder.layers):
        return None
    if not hasattr(model.get_output_embeddings(), "weights"):
        return None
    return Decoder(model, architecture, angles_of(decoder, positions), tap)


def is_plain(architecture: Architecture) -> bool:
    """Whether a decoder has nothing but what `Decoder` computes."""
    scales = architecture.embedding_scale, architecture.residual_scale, architecture.logit_scale
    others = architecture.mixture, architecture.logit_cap, architecture.embedding_width, architecture.residuals
    is_other = architecture.is_parallel or architecture.has_pairs or architecture.norms_less_one
    return (
        architecture.norm is Norm.RMS
        and architecture.activation is Activation.SILU
        and architecture.hidden % SUMMED == 0
        and set(scales) == {1.0}
        and not any((*others, is_other, architecture.multipliers))
        and len(architecture.rotaries) <= 1
        and len({(each.heads, each.kv_heads, each.head_dim) for each in architecture.layers}) == 1
        and all(is_plain_layer(each) for each in architecture.layers)
    )


def is_plain_layer(layer: Layer) -> bool:
    others = layer.cap, layer.latent, layer.source, layer.recurrence
    is_other = layer.is_gated or layer.norms_values or layer.deviations != -math.inf
    return layer.heads > 0 and layer.feeds and not is_other and all(each is None for each in others)


def has_parts(layer: Any) -> bool:
    """Whether a module has the parts of a layer of `Decoder`, and its weights are of the kinds that our kernels take."""
    if {name for name, _ in layer.named_children()} != LAYER:
        return False
    attention, feed_forward = (dict(each.named_children()) for each in (layer.self_attn, layer.mlp))
    if not ATTENTION <= set(attention) <= ATTENTION | OPTIONAL or set(feed_forward) != FEED_FORWARD:
        return False
    merged = attention["q_proj"], feed_forward["gate_proj"]
    if layer.self_attn._parameters or not all(isinstance(each, MergedLinear) for each in merged):
        return False
    gains = [attention[name].weight.shape[0] for name in OPTIONAL & set(attention)]
    products = [*(each.product for each in merged), attention["o_proj"], feed_forward["down_proj"]]
    return {*gains} <= {layer.self_attn.head_dim} and all(hasattr(each, "weights") for each in products)


def layer_weights(module: Any, layer: Layer, number: int) -> LayerWeights:
    attention, feed_forward = module.self_attn, module.mlp
    gains = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    return LayerWeights(
        CacheLayer(number, layer.scaling, layer.window),
        layer.rotary is not None,
        (gains[0], gains[1]),
        attention.q_proj.product.weights,
        attention.o_proj.weights,
        module.post_attention_layernorm.weight,
        feed_forward.gate_proj.product.weights,
        feed_forward.down_proj.weights,
    )


@torch.inference_mode()
def angles_of(decoder: Any, positions: int) -> torch.Tensor:
    """The model's own cosines and sines of all positions, float32 [positions, rotary_dim]."""
    rows = torch.empty(0, dtype=torch.float32, device=decoder.norm.weight.device)

    def some(first: int) -> torch.Tensor:
        at = torch.arange(first, min(first + ANGLES, positions), device=rows.device)
        parts: Sequence[torch.Tensor] = decoder.rotary_emb(rows, at[None])
        return torch.cat([each[0, :, : each.shape[2] // 2].float() for each in parts], 1)

    return torch.cat([some(first) for first in range(0, positions, ANGLES)])


def normed(rows: torch.Tensor, sums: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The residual normed, of what `linear` takes of it."""
    mean = sums.sum(1, keepdim=True) / rows.shape[1]
    return (rows.float() * torch.rsqrt(mean + epsilon)).to(rows.dtype)
