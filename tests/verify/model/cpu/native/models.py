"""Small random decoders of every family that the library computes, as transformers makes them."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from outrider.verify.model.cpu.native import loading as native
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.load_options import LoadOptions
from tests.verify.model.families import SIZES as SMALL

SIZES = SMALL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 16}
WINDOW = 9
WINDOWED: Mapping[str, Any] = {"sliding_window": WINDOW}
PLAIN: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
YARN: Mapping[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 32.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0], "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}


def by_kind(local: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"sliding_attention": dict(local), "full_attention": dict(whole)}}


def mscales(value: float) -> dict[str, Any]:
    return {"mscale": value, "mscale_all_dim": value}


EXPERTS: dict[str, Any] = {"num_experts": 12, "num_local_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
DELTA |= {"linear_value_head_dim": 16, "head_dim": 64}
DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2}
MAMBA = {"mamba_d_state": 16, "mamba_d_head": 32, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_chunk_size": 16}
LATENT: dict[str, Any] = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
LATENT |= {"v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 16}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 12, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
# Of the norms of its latents, transformers leaves the epsilon at this.
KIMI: dict[str, Any] = {**LATENT, **ROUTED, "rms_norm_eps": 1e-6, "linear_head_dim": 32, "linear_num_heads": 4}
KIMI |= {"mlp_layer_types": ["dense", *["sparse"] * 5], "layer_types": DELTA["layer_types"]}
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 3}
BY_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2}
GEMMA4: dict[str, Any] = {**WINDOWED, **TURNS, "attention_k_eq_v": True, "global_head_dim": 32}
GEMMA4 |= {"num_global_key_value_heads": 1, "final_logit_softcapping": 30.0}
GROUPS = {"n_group": 4, "topk_group": 2}
GRANITE = {"logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]}
# With several groups, older versions of transformers norm them together, here and in Mamba 2.
GRANITE_HYBRID: dict[str, Any] = MAMBA | EXPERTS | GRANITE | {"mamba_n_groups": 1, "mamba_expand": 2}
GRANITE_HYBRID |= {"shared_intermediate_size": 32, "embedding_multiplier": 3.0}
GRANITE_HYBRID |= {"layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba"]}
FALCON: dict[str, Any] = MAMBA | {"mamba_d_ssm": 128, "mlp_multipliers": [0.5, 0.8]}
FALCON |= {"ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6}
FALCON |= {"key_multiplier": 0.5, "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.7}
FALCON |= {"embedding_multiplier": 2.0, "lm_head_multiplier": 0.5}
NEMOTRON: dict[str, Any] = EXPERTS | {"layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp", "attention"]}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
NEMOTRON |= {"n_routed_experts": 12, "moe_shared_expert_intermediate_size": 32}
PHI_POSITIONS = {**PLAIN, "rope_type": "longrope", "partial_rotary_factor": 0.75, "factor": 4.0, **LONG}
PHI_POSITIONS |= {"original_max_position_embeddings": 128}
GEMMA3N = {"vocab_size_per_layer_input": 90, "laurel_rank": 16, "activation_sparsity_pattern": [0.9, 0.95, 0.0, 0.5, 0.0, 0.0]}
DEEPSEEK2 = {"qk_nope_head_dim": 24, "topk_method": "group_limited_greedy", "rope_parameters": {**YARN, **mscales(0.707)}}
# By transformers' `model_type`: what differs from SIZES.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "llama": {"rope_parameters": {**PLAIN, "rope_type": "llama3", "factor": 8.0, **LLAMA3}},
    "mistral": WINDOWED,
    "ministral": WINDOWED,
    "ministral3": {"rope_parameters": {**YARN, **mscales(1.0), "llama_4_scaling_beta": 0.1}},
    "qwen2": {"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 2.0}},
    "qwen3": {},
    "gemma": {},
    "gemma2": WINDOWED,
    "gemma3_text": {**WINDOWED, **by_kind(PLAIN, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6})},
    "gemma4_text": GEMMA4 | BY_LAYER | EXPERTS | {"use_double_wide_mlp": True, "enable_moe_block": True, "top_k_experts": 3},
    "gemma4_unified_text": GEMMA4,
    "gemma3n_text": {**WINDOWED, **TURNS, **BY_LAYER, **GEMMA3N},
    "phi3": {"sliding_window": 20, "original_max_position_embeddings": 128, "rope_parameters": PHI_POSITIONS},
    "olmo2": {},
    "olmo3": {**WINDOWED, **by_kind(PLAIN, {**YARN, "attention_factor": 1.2})},
    "smollm3": {},
    "glm4": {},
    "granite": {"embedding_multiplier": 3.0, **GRANITE},
    "cohere2": {**WINDOWED, "logit_scale": 0.25},
    "nemotron": {},
    "seed_oss": {"attention_out_bias": True},
    "exaone4": WINDOWED,
    "ernie4_5": {},
    "arcee": {},
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "olmoe": EXPERTS,
    "granitemoe": {**EXPERTS, **GRANITE},
    "glm4_moe": {**ROUTED, **GROUPS, "use_qk_norm": True},
    "gpt_oss": {**EXPERTS, **WINDOWED, "rope_parameters": {**YARN, "truncate": False}},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "lfm2": {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**CONVOLUTIONS, "num_dense_layers": 1, **EXPERTS},
    "granitemoehybrid": GRANITE_HYBRID,
    "bamba": MAMBA | {"mamba_n_groups": 1, "attn_layer_indices": [1, 4]},
    "falcon_h1": FALCON,
    "nemotron_h": NEMOTRON,
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    "deepseek_v2": LATENT | ROUTED | GROUPS | DEEPSEEK2,
    "deepseek_v3": LATENT | ROUTED | GROUPS | {"q_lora_rank": 48, "rope_parameters": {**YARN, **mscales(1.0)}},
    # Of the norms of its latents, transformers leaves the epsilon at this.
    "glm4_moe_lite": {**LATENT, **ROUTED, "q_lora_rank": 32, "attention_bias": True, "rms_norm_eps": 1e-6},
    "youtu": {**LATENT, "q_lora_rank": 32, "embedding_initializer_range": 0.2},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4, "head_dim": 16, "rope_parameters": {**PLAIN, "rope_theta": None}},
    "kimi_linear": KIMI | GROUPS,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 12, "moe_k": 3, "moe_layer_start_index": 1, "moe_num_shared_experts": 2},
}


# Together they have all operations; the others repeat them.
VARIED: tuple[str, ...] = ("mistral", "gemma4_text", "gemma3n_text", "phi3", "cohere2", "qwen2_moe", "glm4_moe", "gpt_oss")
VARIED += ("qwen3_next", "lfm2_moe", "granitemoehybrid", "falcon_h1", "mamba2", "deepseek_v3", "kimi_linear", "ernie4_5_moe")


def build(family: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """A model with norms and biases that are not what models begin with."""
    torch.manual_seed(1)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], **fields})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        elif not parameter.any():  # routers, in some versions: with equal scores, any experts are the best
            parameter.data.normal_(std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
    model.config.dtype = dtype
    return model.to(dtype)


def runner_of(model: PreTrainedModel, context_tokens: int = 512, **options: Any) -> NativeRunner:
    """The model, packed and started."""
    found = native.of_model(model, LoadOptions("a model", **options))
    assert found is not None
    found.start(context_tokens)
    return found
