"""Small random models of transformers' architectures: with attention alone, recurrent states, or convolutions."""

import functools
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
import transformers

from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.runner import ModelRunner
from tests.trees import tree_of

# The chunks of the text on which logits are compared: steps, and one chunk that is longer than a step. A tree follows.
PREFIX = (0, 37, 38, 120)
# This multiple of the error of transformers' own forward is tolerated.
ROUNDING_FACTOR = 8
# Weights are spread widely, so that a random model has no near-ties.
SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
SIZES |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, **LINEAR}
DELTA |= {"linear_value_head_dim": 8}
MAMBA = {"mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_chunk_size": 16}
MAMBA |= {"mamba_expand": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
KIMI = {**LATENT, **ROUTED, "linear_num_heads": 4, "linear_head_dim": 8, **LINEAR}
KIMI |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5, "global_head_dim": 16}
GEMMA4 |= {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
GEMMA4 |= {"num_kv_shared_layers": 2}
GRANITE = {"shared_intermediate_size": 24, "layer_types": ["mamba", "attention", "mamba", "mamba"]}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16, "expand": 2}

WINDOW = 5
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 8.0}
LONG_ROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
TRAINED = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
SCALED = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24}
# transformers' configuration class, and what differs from SIZES: models of attention alone.
ATTENDING: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}}),
    "llama, yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **TRAINED}}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**SCALED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", SCALED),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
    "llama, dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": ("GptOss", {**EXPERTS, "sliding_window": WINDOW}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
}
# The same of all models.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **ATTENDING,
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**DELTA, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybrid", {**DELTA, "linear_num_key_heads": 4}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}),
    "granite_hybrid": ("GraniteMoeHybrid", {**MAMBA, **EXPERTS, **GRANITE}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "kimi_linear": ("KimiLinear", KIMI),
    "mamba2": ("Mamba2", MAMBA2),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **ROUTED, "head_dim": 4}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **ROUTED, "head_dim": 4, "n_group": 1}),
    "minimax_m2": ("MiniMaxM2", {**EXPERTS, "rotary_dim": 4}),
    "gemma4": ("Gemma4Text", GEMMA4),
    "stablelm": ("StableLm", {}),
    "jamba": ("Jamba", {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "mamba": ("Mamba", {"state_size": 8}),
}
REFUSED = ("jamba", "mamba")  # with a sentence
SERVED = [family for family in FAMILIES if family not in REFUSED]


def config_of(family: str, attention: str, **changes: Any) -> Any:
    """The configuration of a small model of the family, but for `changes`."""
    name, extra = FAMILIES[family]
    sizes = {key: value for key, value in SIZES.items() if name != "GPT2" or "_id" in key or key == "vocab_size"}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **extra, **changes}, attn_implementation=attention)
    config._attn_implementation = attention
    return config


def build(family: str, attention: str, **changes: Any) -> Any:
    """A random float32 model of the family, the same at each call."""
    return random_model(config_of(family, attention, **changes), attention)


def random_model(config: Any, attention: str) -> Any:
    """A random float32 model, the same at each call."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():  # biases, norms and sinks are initialised to constants, which would hide bugs
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def text_of(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


@functools.cache
def tolerance(family: str) -> float:
    """The difference of logits that rounding explains: 1e-4, and some times that of transformers' float32 forward."""
    return 1e-4 + ROUNDING_FACTOR * rounding_error(build(family, "eager"), text_of(100))


@torch.inference_mode()
def rounding_error(model: Any, text: torch.Tensor) -> float:
    """The largest difference of a float32 model's logits from those in float64.

    Layers that normalise small values amplify rounding, differently by CPU.
    """
    found, exact = model(text[None], use_cache=False).logits, deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):  # the default one computes in float32 at most
        exact.set_experts_implementation("eager")
    torch.set_default_dtype(torch.float64)
    try:
        return float((found - exact(text[None], use_cache=False).logits).abs().max())
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def compare(runner: ModelRunner, model: Any) -> float:
    """The largest difference of logits from transformers' own, for a prompt in parts and for a tree."""
    text = text_of(PREFIX[-1])
    expected, cache, worst = model(text[None], use_cache=False).logits[0], runner.new_cache(), 0.0
    for start, stop in pairwise(PREFIX):
        found = torch.as_tensor(runner.forward(cache, ForwardBatch.chain(text[start:stop])))
        worst = max(worst, float((found - expected[start:stop]).abs().max()))
        cache.length = stop
    tree = tree_of(range(10, 16), (-1, 0, 1, 0, -1, 4))
    logits = torch.as_tensor(runner.forward(cache, ForwardBatch.tree(9, tree))).clone()
    for row in range(-1, len(tree)):
        path = torch.cat([text, torch.tensor([9, *tree.path(row)])])
        worst = max(worst, float((logits[row + 1] - model(path[None], use_cache=False).logits[0, -1]).abs().max()))
    return worst
