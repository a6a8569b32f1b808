"""Defaults for names that a configuration lacks: the numbers with which each family's code was published.

Names are those of `outrider.verify.model.architecture.standard`. Files lack names that are younger than they are, and their
parts about text those whose numbers were not changed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
EXPERTS = ("num_experts", "num_experts_per_tok")
COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "position_embedding_type": "rope",
    "no_rope_layer_interval": 4,
    "max_window_layers": 28,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "altup_num_inputs": 0,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    # Experts.
    "enable_moe_block": True,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    # Latent attention.
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # Recurrent layers.
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_allow_neg_eigval": False,
    "linear_norm_eps": None,
    "conv_L_cache": 3,
    "conv_kernel": 4,
    "mamba_num_heads": 128,
    "mamba_expand": 2,
    "mamba_norm_before_gate": False,
    "time_step_min": 0.0,
    "time_step_limit": (0.0, math.inf),
    "mlp_multipliers": (1.0, 1.0),
    "ssm_multipliers": (1.0, 1.0, 1.0, 1.0, 1.0),
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "key_multiplier": 1.0,
}


def numbers(sizes: Sequence[int | None], experts: tuple[int, int | None] | None = None, **others: Any) -> Mapping[str, Any]:
    """The numbers of a family: its `SIZES`, its `EXPERTS`, and the others that are not those of `COMMON`."""
    found = {**COMMON, **dict(zip(SIZES, sizes, strict=True)), **others}
    return found if experts is None else {**found, **dict(zip(EXPERTS, experts, strict=True))}


GEMMA4_POSITIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
GELU: Mapping[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
WINDOW: Mapping[str, Any] = {"sliding_window": 4096}
UNUSED_WINDOW: Mapping[str, Any] = {"sliding_window": 4096, "use_sliding_window": False}
QWEN_STATES: Mapping[str, Any] = {"head_dim": 256, "partial_rotary_factor": 0.25}
# By `model_type` in config.json.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": numbers((32000, 4096, 32, 32, None, 2048)),
    "mistral": numbers((32000, 4096, 32, 32, 8, 131072), **WINDOW),
    "ministral": numbers((32000, 4096, 32, 32, 8, 131072), **WINDOW),
    "ministral3": numbers(
        (131072, 4096, 34, 32, 8, 262144),
        rms_norm_eps=1e-5,
        head_dim=128,
        rope_theta=1000000.0,
        rope_parameters={
            "type": "yarn",
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "max_position_embeddings": 262144,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "qwen2": numbers((151936, 4096, 32, 32, 32, 32768), **UNUSED_WINDOW),
    "qwen3": numbers((151936, 4096, 32, 32, 32, 32768), **UNUSED_WINDOW, head_dim=128),
    "gemma": numbers((256000, 3072, 28, 16, 16, 8192), **GELU),
    "gemma2": numbers(
        (256000, 2304, 26, 8, 4, 8192),
        **GELU,
        **WINDOW,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3_text": numbers((262208, 2304, 26, 8, 4, 131072), **GELU, **WINDOW, query_pre_attn_scalar=256, rope_theta=1000000.0),
    "gemma4_text": numbers(
        (262144, 2304, 30, 8, 4, 131072),
        **GELU,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        enable_moe_block=False,
        attention_k_eq_v=False,
        rope_parameters=GEMMA4_POSITIONS,
    ),
    "gemma4_unified_text": numbers(
        (262144, 2304, 30, 8, 4, 262144), **GELU, sliding_window=1024, attention_k_eq_v=False, rope_parameters=GEMMA4_POSITIONS
    ),
    "gemma3n_text": numbers(
        (262400, 2048, 35, 8, 2, 32768),
        **GELU,
        sliding_window=512,
        final_logit_softcapping=30.0,
        altup_num_inputs=4,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=15,
        rope_theta=1000000.0,
    ),
    "phi3": numbers(
        (32064, 3072, 32, 32, None, 4096), rms_norm_eps=1e-5, original_max_position_embeddings=4096, partial_rotary_factor=1.0
    ),
    "olmo2": numbers((50304, 4096, 32, 32, None, 2048), rms_norm_eps=1e-5),
    "olmo3": numbers((50304, 4096, 32, 32, None, 2048), **WINDOW, rms_norm_eps=1e-5, rope_theta=500000.0),
    "smollm3": numbers(
        (128256, 2048, 36, 16, 4, 32768), tie_word_embeddings=True, use_sliding_window=False, rope_theta=2000000.0
    ),
    "glm4": numbers((151552, 4096, 40, 32, 2, 131072), rms_norm_eps=1.5625e-7, head_dim=128, partial_rotary_factor=0.5),
    "granite": numbers((32000, 4096, 32, 32, None, 2048), attention_multiplier=1.0),
    "cohere2": numbers(
        (256000, 8192, 40, 64, None, 8192), **WINDOW, rms_norm_eps=1e-5, tie_word_embeddings=True, logit_scale=0.0625
    ),
    "nemotron": numbers((256000, 6144, 32, 48, None, 4096), hidden_act="relu2", rms_norm_eps=1e-5, partial_rotary_factor=0.5),
    "seed_oss": numbers((155136, 4096, 64, 80, 8, 524288), head_dim=128),
    "exaone4": numbers((102400, 4096, 32, 32, 32, 2048), **WINDOW, rms_norm_eps=1e-5),
    "ernie4_5": numbers(
        (103424, 1024, 18, 16, 2, 131072), rms_norm_eps=1e-5, head_dim=128, tie_word_embeddings=True, rope_theta=500000.0
    ),
    "arcee": numbers((32000, 2560, 32, 32, None, 4096), hidden_act="relu2", rms_norm_eps=1e-5),
    "mixtral": numbers((32000, 4096, 32, 32, 8, 131072), (8, 2), rms_norm_eps=1e-5, rope_theta=1000000.0),
    "qwen2_moe": numbers((151936, 2048, 24, 16, 16, 32768), (60, 4), **UNUSED_WINDOW),
    "qwen3_moe": numbers((151936, 2048, 24, 32, 4, 32768), (128, 8), **UNUSED_WINDOW),
    "olmoe": numbers((50304, 2048, 16, 16, None, 4096), (64, 8), rms_norm_eps=1e-5),
    "granitemoe": numbers((32000, 4096, 32, 32, None, 2048), (8, 2), attention_multiplier=1.0),
    "glm4_moe": numbers(
        (151552, 4096, 46, 96, 8, 131072), (128, 8), rms_norm_eps=1e-5, norm_topk_prob=True, partial_rotary_factor=0.5
    ),
    "gpt_oss": numbers(
        (201088, 2880, 36, 64, 8, 131072),
        (128, 4),
        rms_norm_eps=1e-5,
        head_dim=64,
        sliding_window=128,
        rope_theta=150000.0,
        rope_parameters={
            "rope_type": "yarn",
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    "qwen3_5_text": numbers((248320, 4096, 32, 16, 4, 32768), **QWEN_STATES),
    "qwen3_5_moe_text": numbers((248320, 2048, 40, 16, 2, 32768), (256, 8), **QWEN_STATES),
    "qwen3_next": numbers((151936, 2048, 48, 16, 2, 32768), (512, 10), **QWEN_STATES, norm_topk_prob=True),
    "lfm2": numbers((65536, 2560, 32, 32, 8, 128000), rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=1000000.0),
    "lfm2_moe": numbers(
        (65536, 2048, 32, 32, 8, 128000),
        (32, 4),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        norm_topk_prob=True,
        rope_theta=1000000.0,
    ),
    "granitemoehybrid": numbers(
        (32000, 4096, 32, 32, None, 2048),
        (8, 2),
        n_groups=1,
        state_size=256,
        mamba_head_dim="auto",
        attention_multiplier=1.0,
        position_embedding_type=None,
    ),
    "bamba": numbers(
        (128000, 4096, 32, 32, 8, 262144),
        rms_norm_eps=1e-5,
        n_groups=1,
        state_size=256,
        mamba_head_dim="auto",
        partial_rotary_factor=0.5,
    ),
    "falcon_h1": numbers(
        (128000, 4096, 32, 32, 8, 8192),
        rms_norm_eps=1e-5,
        n_groups=1,
        state_size=256,
        mamba_head_dim="auto",
        mamba_norm_before_gate=True,
        mamba_d_ssm=1024,
    ),
    "nemotron_h": numbers(
        (131072, 4096, 4, 32, 8, 4096),
        (8, 2),
        hidden_act="relu2",
        rms_norm_eps=1e-5,
        n_groups=8,
        state_size=128,
        mamba_head_dim=64,
        head_dim=128,
        norm_topk_prob=True,
        time_step_min=0.001,
        layer_types=("linear_attention", "moe", "full_attention", "mlp"),
    ),
    "mamba2": numbers((32768, 4096, 64, None, None, None), rms_norm_eps=1e-5, n_groups=8, state_size=128, head_dim=64),
    "deepseek_v2": numbers((102400, 4096, 32, 32, None, 2048), (64, None), topk_method="greedy"),
    "deepseek_v3": numbers(
        (129280, 7168, 61, 128, 128, 4096),
        (256, 8),
        rope_interleave=True,
        norm_topk_prob=True,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    ),
    "glm4_moe_lite": numbers(
        (154880, 2048, 47, 20, 20, 202752),
        (64, 4),
        rms_norm_eps=1e-5,
        rope_interleave=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
        qk_nope_head_dim=192,
        v_head_dim=256,
        q_lora_rank=768,
    ),
    "youtu": numbers((128256, 2048, 32, 16, 16, 131072), tie_word_embeddings=True, rope_interleave=True),
    "olmo_hybrid": numbers(
        (100352, 3840, 32, 30, None, 65536),
        linear_num_key_heads=None,
        linear_num_value_heads=None,
        linear_key_head_dim=None,
        linear_value_head_dim=None,
        linear_allow_neg_eigval=True,
        linear_norm_eps=1e-5,
    ),
    "kimi_linear": numbers(
        (163840, 2304, 27, 32, 32, 1048576),
        (256, 8),
        rms_norm_eps=1e-5,
        norm_topk_prob=True,
        routed_scaling_factor=2.446,
        q_lora_rank=None,
        linear_num_key_heads=32,
    ),
    "ernie4_5_moe": numbers(
        (103424, 2560, 28, 20, 4, 131072), (64, 6), rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=500000.0
    ),
}
