"""Models of known shapes with random weights, whose logits spread as a trained model's do."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cache.shape import KVDtype
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.load_options import Quantize
from outrider.verify.model.loading import prepare, resolve_devices
from outrider.verify.model.quantization import check_quantization, quantize_model
from outrider.verify.model.torch_runner import TorchRunner

# The cost of sampling depends on how flat the distribution is.
LOGITS_DEVIATION = 3.0


def llama(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **extra: Any) -> LlamaConfig:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return LlamaConfig(**sizes, num_key_value_heads=kv_heads, intermediate_size=ffn, **extra)


def qwen3_mixture() -> Qwen3MoeConfig:
    """The configuration of Qwen3-30B-A3B, which chooses 8 of 128 experts."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    window = {"max_position_embeddings": 40960, "vocab_size": 151936}
    return Qwen3MoeConfig(**sizes, **window, moe_intermediate_size=768, norm_topk_prob=True)


SHAPES: dict[str, Callable[[], Any]] = {
    "llama-3-8b": lambda: llama(4096, 32, 32, 8, 14336, vocab_size=128256, max_position_embeddings=8192),
    "llama-3-70b": lambda: llama(8192, 80, 64, 8, 28672, vocab_size=128256, max_position_embeddings=8192),
    "llama-7m": lambda: llama(256, 8, 4, 2, 704, vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=True),
    "qwen3-30b-a3b": qwen3_mixture,
}


def random_runner(
    shape: str,
    dtype: torch.dtype,
    device: str = "auto",
    context_tokens: int | None = None,
    quantize: Quantize = "none",
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
    check_quantization(quantize, devices[0])
    placement = Placement(model, devices)
    quantize_model(model, quantize, placement)
    placement.move()
    return TorchRunner(model, context_tokens, kv_dtype=kv_dtype)
