"""Models of known shapes with random weights, whose logits spread as a trained model's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from bench.plan import BenchError
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cache.shape import KVDtype
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.load_options import UNQUANTIZED, Compile, Quantization
from outrider.verify.model.loading import prepare, resolve_devices
from outrider.verify.model.quantization import check_quantization, quantize_model
from outrider.verify.model.torch_runner import TorchRunner

# The cost of sampling depends on how flat the distribution is.
LOGITS_DEVIATION = 3.0
LLAMA = {"vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False}


def llama(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **extra: Any) -> LlamaConfig:
    """The configuration of a Llama."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return LlamaConfig(**{**LLAMA, **sizes, "num_key_value_heads": kv_heads, "intermediate_size": ffn, **extra})


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **extra: Any) -> Qwen3Config:
    """The configuration of a Qwen3."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    window = {"max_position_embeddings": 40960, "vocab_size": 151936, "head_dim": 128}
    return Qwen3Config(**{**sizes, **window, "intermediate_size": ffn, **extra})


def qwen3_moe(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **extra: Any) -> Qwen3MoeConfig:
    """The configuration of a mixture of Qwen3's, of experts of width `ffn`."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    window = {"max_position_embeddings": 40960, "vocab_size": 151936, "head_dim": 128, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**sizes, **window, "moe_intermediate_size": ffn, **extra})


def qwen3_5(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **extra: Any) -> Qwen3_5TextConfig:
    """The configuration of a Qwen3.5: three layers with the gated delta rule to each with attention."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True}
    window = {"max_position_embeddings": 40960, "vocab_size": 32000, "head_dim": 256}
    return Qwen3_5TextConfig(**{**sizes, **linear, **window, "intermediate_size": ffn, **extra})


SHAPES: dict[str, Callable[[], Any]] = {
    "smollm2-135m": lambda: llama(
        576, 30, 9, 3, 1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True
    ),
    "llama-110m": lambda: llama(768, 12, 12, 4, 2048),
    "llama-160m": lambda: llama(768, 12, 12, 12, 3072),
    "llama-460m": lambda: llama(1280, 22, 20, 4, 3456),
    "llama-1b": lambda: llama(2048, 16, 32, 8, 8192),
    "llama-2-7b": lambda: llama(4096, 32, 32, 32, 11008),
    "llama-3-8b": lambda: llama(4096, 32, 32, 8, 14336, vocab_size=128256, max_position_embeddings=8192),
    "llama-7m": lambda: llama(256, 8, 4, 2, 704, vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=True),
    "qwen3-0.6b": lambda: qwen3(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3.5-400m": lambda: qwen3_5(1024, 20, 8, 2, 3584),
    "qwen3-8b": lambda: qwen3(4096, 36, 32, 8, 12288),
    "qwen3-30b-a3b": lambda: qwen3_moe(2048, 48, 32, 4, 768),  # 8 of 128 experts
    "mixture-10m": lambda: qwen3_moe(256, 4, 4, 2, 64, vocab_size=4096, num_experts=32, num_experts_per_tok=4, head_dim=64),
}


def check_shape(shape: str) -> None:
    """Raises BenchError if `shape` is not in SHAPES."""
    if shape not in SHAPES:
        raise BenchError(f"There is no shape {shape!r}; choose from {', '.join(SHAPES)}.")


def random_runner(
    shape: str,
    dtype: torch.dtype,
    device: str = "auto",
    context_tokens: int | None = None,
    pack: bool = True,
    compile: Compile = "auto",
    quantization: Quantization = UNQUANTIZED,
    kv_dtype: KVDtype = "auto",
) -> TorchRunner:
    """A runner of random weights, created on the device and quantised there; over several devices, created on the CPU.

    A context beyond the shape's own limit raises that.
    """
    devices = resolve_devices(device)
    torch.manual_seed(0)
    config = SHAPES[shape]()
    config.max_position_embeddings = max(config.max_position_embeddings, context_tokens or 0)
    config.initializer_range = LOGITS_DEVIATION / config.hidden_size**0.5
    with torch.device(devices[0] if len(devices) == 1 else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    prepare(model, context_tokens)
    check_quantization(quantization, devices[0])
    placement = Placement(model, devices)
    quantize_model(model, quantization, placement)
    placement.move()
    return TorchRunner(model, context_tokens, pack, compile, kv_dtype=kv_dtype)
