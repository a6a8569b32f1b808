"""Describes a model to the library: its sizes, and where its weights are.

Models are recognised by class. What the description says is checked at load like any other forward: the logits must be those of
transformers' own (`outrider.verify.model.self_check`).
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from outrider.verify.model.attention.interface import cache_layer
from outrider.verify.model.cpu.native import library
from outrider.verify.model.cpu.native.layers import NativeEmbedding, NativeLinear

# Classes whose layers are: norm, attention, norm, gated feed-forward; with or without biases, and norms of queries and keys.
CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_tanh": 1}
# Sizes are multiples of this (vector.h).
SUMMED = 16
# The largest width of a head.
MOST_WIDTH = 256
# The largest number of query heads for one key head.
MOST_GROUPS = 64


def is_supported(name: str, config: Any) -> bool:
    """Whether the library computes the forward of the class `name` with this configuration."""
    if name not in CLASSES or config.hidden_act not in ACTIVATIONS:
        return False
    width = head_width(config)
    sizes = (config.hidden_size, config.intermediate_size, width)
    groups = config.num_attention_heads // config.num_key_value_heads
    return all(size % SUMMED == 0 for size in sizes) and width <= MOST_WIDTH and groups <= MOST_GROUPS


def head_width(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class Decoder:
    """The library's description of a packed model, and the tensors that it refers to."""

    def __init__(self, model: PreTrainedModel, windows: dict[int, int | None]) -> None:
        """`windows` are the sliding windows by layer of the cache. Requires `is_supported`."""
        self._kept: list[object] = []
        config = model.config
        body, head = cast(Any, model).model, model.get_output_embeddings()
        table = body.embed_tokens
        assert isinstance(table, NativeEmbedding) and isinstance(head, NativeLinear)
        layers = [layer for layer in body.layers if hasattr(layer, "self_attn")]
        frequencies = self._floats(body.rotary_emb.inv_freq)
        rotary = 2 * len(body.rotary_emb.inv_freq)
        described = [self._layer(layer, windows, rotary) for layer in layers]
        self._layers = (library.Layer * len(layers))(*described)
        self.vocabulary = head.out_features
        self.description = library.Model(
            layers=len(layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_width(config),
            intermediate=config.intermediate_size,
            activation=ACTIVATIONS[config.hidden_act],
            epsilon=config.rms_norm_eps,
            scaling=layers[0].self_attn.scaling,
            rotary_scaling=float(body.rotary_emb.attention_scaling),
            embedding_scale=1.0,
            residual_scale=1.0,
            logit_scale=1.0,
            layer=ctypes.cast(self._layers, ctypes.POINTER(library.Layer)),
            embedding=table.weights.matrix,
            head=self._linear(head),
            norm=self._floats(body.norm.weight),
            frequencies=frequencies,
        )

    def shape_of(self, layer: int, name: str) -> tuple[int, int]:
        """The outputs and inputs of a projection of a layer."""
        matrix = getattr(self._layers[layer], name).matrix
        return matrix.outputs, matrix.inputs

    def _layer(self, layer: Any, windows: dict[int, int | None], rotary: int) -> library.Layer:
        attention, gated = layer.self_attn, layer.mlp
        norms = {name: getattr(attention, name, None) for name in ("q_norm", "k_norm")}
        return library.Layer(
            attention_norm=self._floats(layer.input_layernorm.weight),
            feed_forward_norm=self._floats(layer.post_attention_layernorm.weight),
            query_norm=None if norms["q_norm"] is None else self._floats(norms["q_norm"].weight),
            key_norm=None if norms["k_norm"] is None else self._floats(norms["k_norm"].weight),
            query=self._linear(attention.q_proj),
            key=self._linear(attention.k_proj),
            value=self._linear(attention.v_proj),
            output=self._linear(attention.o_proj),
            gate=self._linear(gated.gate_proj),
            up=self._linear(gated.up_proj),
            down=self._linear(gated.down_proj),
            cached=cache_layer(attention),
            window=windows.get(cache_layer(attention)) or 0,
            rotary=rotary,
        )

    def _linear(self, layer: NativeLinear) -> library.Linear:
        self._kept.append(layer.weights)
        return library.Linear(layer.weights.matrix, None if layer.bias is None else self._floats(layer.bias))

    def _floats(self, tensor: torch.Tensor) -> int:
        """The address of a float32 copy."""
        found = tensor.detach().to(torch.float32, copy=True).contiguous()
        self._kept.append(found)
        return found.data_ptr()
