"""Small models with random weights that read pictures, one of each family, and pictures as their processors make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    InternVLConfig,
    Llama4Config,
    LlavaConfig,
    Mistral3Config,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

VOCABULARY, PIXELS, SEPARATOR, OPEN, CLOSE, END = 300, 290, 295, 292, 293, 299
PATCH = 4
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": PATCH}
GRID = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# The window is shorter than a picture.
WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
QWEN = {"video_token_id": 291, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@dataclass(frozen=True)
class Family:
    """A family's configuration, and a picture for it."""

    config: Callable[[], Any]
    tokens: Sequence[int]
    arguments: Callable[[], dict[str, torch.Tensor]]
    types: str | None = None  # the argument of transformers' forward that tells which tokens stand for pixels
    joined: int = 0  # the dimension along which the arguments of several pictures are joined

    def model(self, attention: str | dict[str, str] = "sdpa") -> PreTrainedModel:
        """The model; equal at each call."""
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(self.config(), attn_implementation=attention)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.15)
        return model.eval()

    def together(self, pictures: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The arguments of several pictures in one prompt, as transformers takes them."""
        return {name: torch.cat([picture[name] for picture in pictures], self.joined) for name in pictures[0]}


def qwen(config: Any, sections: Mapping[str, Any] = SECTIONS, **vision: Any) -> Callable[[], Any]:
    return lambda: config(
        text_config={**TEXT, "rope_parameters": {**sections}},
        vision_config={**GRID, **vision},
        image_token_id=PIXELS,
        tie_word_embeddings=False,
        **QWEN,
    )


def grid() -> dict[str, torch.Tensor]:
    return {"pixel_values": normal(32, 3 * 2 * PATCH * PATCH), "image_grid_thw": torch.tensor([[1, 4, 8]])}


def tiles() -> dict[str, torch.Tensor]:
    return {"pixel_values": normal(1, 1, 3, 32, 32)}


def image(size: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": normal(1, 3, size, size)}


def patches() -> dict[str, torch.Tensor]:
    places = torch.tensor([[x, y] for y in range(4) for x in range(8)])[None]
    return {"pixel_values": torch.rand(1, 32, 3 * PATCH * PATCH), "image_position_ids": places}


def tiled(config: Any) -> Family:
    """Idefics3 and its successor read a picture in tiles, those of several pictures in one list."""
    vision = {**VISION, "image_size": 32}
    text = {**TEXT, "model_type": "llama"}
    shape = {"scale_factor": 2, "image_token_id": PIXELS, "pad_token_id": 0}
    return Family(lambda: config(text_config=text, vision_config=vision, **shape), [PIXELS] * 16, tiles, joined=1)


FAMILIES = {
    "gemma3": Family(
        lambda: Gemma3Config(
            text_config={**TEXT, **WINDOWS, "query_pre_attn_scalar": 16},
            vision_config={**VISION, "image_size": 32},
            mm_tokens_per_image=16,
            image_token_index=PIXELS,
            tie_word_embeddings=False,  # else the model repeats its last token
        ),
        [PIXELS] * 16,
        image(32),
        "token_type_ids",
    ),
    "gemma4": Family(
        lambda: Gemma4Config(
            text_config={
                **TEXT,
                **WINDOWS,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "sliding_window": 6,
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCABULARY,
                "num_kv_shared_layers": 0,
                "use_bidirectional_attention": "vision",
            },
            vision_config={
                **VISION,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            audio_config=None,
            image_token_id=PIXELS,
            video_token_id=291,
            audio_token_id=294,
            tie_word_embeddings=False,
        ),
        [PIXELS] * 8,
        patches,
        "mm_token_type_ids",
    ),
    "idefics3": tiled(Idefics3Config),
    "internvl": Family(
        lambda: InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**VISION, "image_size": [16, 16], "patch_size": [PATCH, PATCH]},
            image_token_id=PIXELS,
            image_seq_length=4,
            downsample_ratio=0.5,
        ),
        [PIXELS] * 4,
        image(16),
    ),
    "llama4": Family(
        lambda: Llama4Config(
            text_config={
                **TEXT,
                "intermediate_size_mlp": 96,
                "num_local_experts": 2,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 256,
                "no_rope_layers": [1, 1, 0],
            },
            vision_config={
                **VISION,
                "intermediate_size": 128,
                "image_size": 16,
                "pixel_shuffle_ratio": 0.5,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            image_token_index=PIXELS,
        ),
        [PIXELS] * 4,
        image(16),
    ),
    "llava": Family(
        lambda: LlavaConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**VISION, "model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 16},
            image_token_index=PIXELS,
            image_seq_length=16,
        ),
        [PIXELS] * 16,
        image(16),
    ),
    "mistral3": Family(
        lambda: Mistral3Config(
            text_config={**TEXT, "model_type": "mistral"},
            vision_config={**VISION, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
            image_token_index=PIXELS,
            spatial_merge_size=2,
        ),
        [PIXELS] * 2 + [SEPARATOR] + [PIXELS] * 2,
        lambda: {"pixel_values": normal(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])},
    ),
    "qwen2_vl": Family(
        qwen(Qwen2VLConfig, depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2),
        [PIXELS] * 8,
        grid,
        "mm_token_type_ids",
    ),
    "qwen2_5_vl": Family(
        qwen(
            Qwen2_5_VLConfig,
            depth=2,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            window_size=16,
            out_hidden_size=64,
            fullatt_block_indexes=[1],
        ),
        [PIXELS] * 8,
        grid,
        "mm_token_type_ids",
    ),
    "qwen3_vl": Family(
        qwen(
            Qwen3VLConfig,
            {**SECTIONS, "mrope_interleaved": True},
            depth=3,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            out_hidden_size=64,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        [PIXELS] * 8,
        grid,
        "mm_token_type_ids",
    ),
    "smolvlm": tiled(SmolVLMConfig),
}
