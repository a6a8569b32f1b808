"""Loads a GGUF file as it is: its blocks are packed for the kernels, without unpacking or rounding them again.

Files of other architectures than those in `FAMILIES`, or with scaled positions, are loaded by transformers, which unpacks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import StoredTensor, read_metadata
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cpu.native.layers import NativeEmbedding, NativeLinear
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.weights import Kind, Weights

# The data type of keys and values.
CACHE_DTYPE = torch.bfloat16
F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
# Types that are packed as they are. Others are unpacked, and rounded to bfloat16.
KINDS = {GGMLQuantizationType.Q8_0: Kind.INT8, GGMLQuantizationType.Q4_1: Kind.INT4} | {
    GGMLQuantizationType[kind.name]: kind for kind in Kind if kind > Kind.INT4
}
# The names in the file, by the names of modules in a layer.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


@dataclass(frozen=True)
class Family:
    """Models that a file names as one architecture."""

    config: type[PreTrainedConfig]
    is_interleaved: bool  # rows of queries and keys are stored in the order that ggml rotates: pairs side by side


FAMILIES = {
    "llama": Family(LlamaConfig, True),
    "qwen2": Family(Qwen2Config, False),
    "qwen3": Family(Qwen3Config, False),
}


class GgufFile:
    """An open file with the tensors of a model."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self.path, self.metadata = path, read_metadata(path)
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")

    def __contains__(self, name: str) -> bool:
        return name in self.metadata.tensors

    def tensor(self, name: str) -> StoredTensor:
        """A tensor's description. Raises ModelError."""
        if name not in self.metadata.tensors:
            raise ModelError(f"{str(self.path)!r} has no tensor {name}; download the file again, or serve another one.")
        return self.metadata.tensors[name]

    def stored(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, uint8 [rows, bytes]. Raises ModelError."""
        tensor = self.tensor(name)
        block, size = quants.GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        end = tensor.start + prod(tensor.shape) // block * size
        if end > len(self._bytes):
            raise ModelError(f"{str(self.path)!r} ends within the tensor {name}; download the file again.")
        return self._bytes[tensor.start : end].reshape(prod(tensor.shape[:-1]), -1)

    def floats(self, name: str) -> torch.Tensor:
        """A tensor's values, float32. Raises ModelError."""
        tensor = self.tensor(name)
        values = quants.dequantize(self.stored(name), GGMLQuantizationType(tensor.kind))
        return torch.from_numpy(values.astype(np.float32).reshape(tensor.shape))


def load_gguf(path: Path, engine: Engine) -> PreTrainedModel | None:
    """The model with packed weights; None if its architecture is not one of `FAMILIES`. Raises ModelError."""
    file = GgufFile(path)
    family, config = FAMILIES.get(file.metadata.entries["general.architecture"]), None
    if family is not None:
        config = read_config(file, family)
    if family is None or config is None:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    _fill(model, file, family, engine)
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.float().eval()


def read_config(file: GgufFile, family: Family) -> PreTrainedConfig | None:
    """The model's configuration; None if its positions are scaled."""
    entries = file.metadata.entries
    name = entries["general.architecture"]

    def entry(key: str, default: Any = None) -> Any:
        return entries.get(f"{name}.{key}", default)

    if entry("rope.scaling.type", "none") != "none":
        return None
    heads = entry("attention.head_count")
    width = entry("attention.key_length", entry("embedding_length") // heads)
    return family.config(
        vocab_size=file.tensor("token_embd.weight").shape[0],
        hidden_size=entry("embedding_length"),
        intermediate_size=entry("feed_forward_length"),
        num_hidden_layers=entry("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=entry("attention.head_count_kv", heads),
        head_dim=width,
        max_position_embeddings=entry("context_length"),
        rms_norm_eps=entry("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": entry("rope.freq_base", 10000.0)},
        attention_bias=name == "llama" and "blk.0.attn_q.bias" in file,
        tie_word_embeddings="output.weight" not in file,
        bos_token_id=entries.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=entries.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=entries.get("tokenizer.ggml.padding_token_id"),
        dtype=CACHE_DTYPE,
    )


def _fill(model: PreTrainedModel, file: GgufFile, family: Family, engine: Engine) -> None:
    """Gives the modules of a model on the meta device their weights."""
    body: Any = model.get_decoder()
    config: Any = model.config
    turned = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if family.is_interleaved else {}
    for number, layer in enumerate(body.layers):
        for module, name in LAYER.items():
            place = f"blk.{number}.{name}"
            found = _submodule(layer, module)
            if isinstance(found, torch.nn.Linear):
                layer.set_submodule(module, _linear(found, file, place, engine, turned.get(name, 0)))
            elif found is not None:
                found.weight = _parameter(file.floats(f"{place}.weight"))
    body.norm.weight = _parameter(file.floats("output_norm.weight"))
    body.rotary_emb = type(body.rotary_emb)(config)
    if "rope_freqs.weight" in file:  # Llama 3.1 and later: factors of the wave lengths
        body.rotary_emb.inv_freq = body.rotary_emb.inv_freq / file.floats("rope_freqs.weight")
    table = _weights(file, "token_embd.weight", engine)
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    tied = "output.weight" not in file
    model.set_output_embeddings(NativeLinear(head, table if tied else _weights(file, "output.weight", engine)))
    model.set_input_embeddings(NativeEmbedding(table))


def _submodule(layer: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """A module in a layer; None if this model has none."""
    try:
        return layer.get_submodule(name)
    except AttributeError:
        return None


def _linear(linear: torch.nn.Linear, file: GgufFile, place: str, engine: Engine, heads: int) -> NativeLinear:
    """The layer with the file's weights. With `heads`, rows are brought into the order that transformers rotates."""

    def order(rows: Any) -> Any:
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape) if heads else rows

    bias = f"{place}.bias"
    linear.register_parameter("bias", _parameter(order(file.floats(bias))) if bias in file else None)
    return NativeLinear(linear, _weights(file, f"{place}.weight", engine, order))


def _weights(file: GgufFile, name: str, engine: Engine, order: Callable[[Any], Any] = lambda rows: rows) -> Weights:
    """A tensor's packed weights, the rows in this order."""
    tensor = file.tensor(name)
    outputs, inputs = tensor.shape
    stored = GGMLQuantizationType(tensor.kind)
    if stored in KINDS:
        weights = Weights(engine, KINDS[stored], outputs, inputs)
        weights.pack_blocks(order(file.stored(name)))
        return weights
    kind = Kind.FLOAT32 if stored in (F32, F16) else Kind.BFLOAT16
    return Weights.of(engine, kind, order(file.floats(name)))


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)
