"""Converts models to GGUF files.

Needs the optional extra `gguf`. A file of `convert` does not say how text is split before merges: tokens
have the same ids and texts, but a text may become other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from bench.plan import BenchError
from outrider.verify.tokenizer import load_tokenizer

NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
# The names of these types do not begin with MOSTLY.
FILE_TYPES = {"F32": "ALL_F32"}
# The embedding table may be the head.
HEADS = ("lm_head.weight", "model.embed_tokens.weight")


def convert(folder: Path, file: Path, weights: str = "F16") -> None:
    """Writes the model of a folder; `weights` is a type of GGUF such as F16, Q8_0 or Q4_0. Raises BenchError."""
    config = AutoConfig.from_pretrained(folder)
    stored = folder / "model.safetensors"
    check_kind(config, str(folder))
    if not stored.exists():
        raise BenchError(f"{folder} has no model.safetensors; only models in one file are converted.")
    write(file, config, load_file(stored), weights, folder)


def write(file: Path, config: Any, tensors: Mapping[str, torch.Tensor], weights: str, tokenizer: Path | None = None) -> None:
    """Writes a Llama's tensors, by their names in a folder.

    The file has the vocabulary of the folder `tokenizer`; without one, it serves token ids only.
    """
    import gguf

    writer, names = gguf.GGUFWriter(file, "llama"), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES.get(weights, f"MOSTLY_{weights}")])
    add_shape(writer, config)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_tokenizer(writer, tokenizer)
    for name, tensor in sorted(tensors.items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            values = interleaved(values, heads)
        kind = gguf.GGMLQuantizationType[tensor_type(name, values.ndim, weights)]
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_kind(config: Any, name: str) -> None:
    """Raises BenchError for a model that is not converted."""
    if config.model_type != "llama":
        raise BenchError(f"{name} is no Llama; only Llamas are converted.")
    if config.rope_parameters["rope_type"] != "default":
        raise BenchError(f"{name} has scaled rotary positions; only Llamas without them are converted.")


def tensor_type(name: str, dimensions: int, weights: str) -> str:
    """The type in which a tensor is stored: norms in 32 bits; the head, as with `model.quantize`, in 8 or more."""
    if dimensions == 1:
        return "F32"
    return "Q8_0" if weights == "Q4_0" and name in HEADS else weights


def interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The rows of a query or key projection with the halves of each rotated pair side by side."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def add_shape(writer: Any, config: Any) -> None:
    """All numbers of a Llama."""
    add_sizes(writer, config)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_sizes(writer: Any, config: Any) -> None:
    """The numbers that files of every family have."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)


def add_tokenizer(writer: Any, folder: Path) -> None:
    """The vocabulary, the merges and the chat template."""
    tokenizer = load_tokenizer(str(folder))
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL_TOKEN if id in special else NORMAL_TOKEN for id in range(len(tokens))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
