"""Small models with random weights that read pictures, one of each family, and pictures as their processors make them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

VOCABULARY, PIXELS, SEPARATOR, OPEN, CLOSE, END = 300, 290, 295, 292, 293, 299
PATCH = 4
TEXT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
TEXT |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": PATCH}
GRID = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# The window is shorter than a picture.
WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@dataclass(frozen=True)
class Family:
    config: Callable[[], Any]
    tokens: Sequence[int]
    arguments: Callable[[], dict[str, torch.Tensor]]
    types: str | None = None  # the argument of transformers' forward that tells which tokens stand for pixels
    joined: int = 0  # the dimension along which the arguments of several pictures are joined

    def model(self, attention: str | dict[str, str] = "sdpa") -> transformers.PreTrainedModel:
        """The model; equal at each call."""
        torch.manual_seed(0)
        model: transformers.PreTrainedModel = transformers.AutoModelForImageTextToText.from_config(
            self.config(), attn_implementation=attention
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.15)
        return model.eval()

    def together(self, pictures: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The arguments of several pictures in one prompt, as transformers takes them."""
        return {name: torch.cat([picture[name] for picture in pictures], self.joined) for name in pictures[0]}


def grid() -> dict[str, torch.Tensor]:
    return {"pixel_values": normal(32, 3 * 2 * PATCH * PATCH), "image_grid_thw": torch.tensor([[1, 4, 8]])}


def tiles() -> dict[str, torch.Tensor]:
    return {"pixel_values": normal(1, 1, 3, 32, 32)}


def image(size: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": normal(1, 3, size, size)}


def patches() -> dict[str, torch.Tensor]:
    places = torch.tensor([[x, y] for y in range(4) for x in range(8)])[None]
    return {"pixel_values": torch.rand(1, 32, 3 * PATCH * PATCH), "image_position_ids": places}


def sized() -> dict[str, torch.Tensor]:
    return {"pixel_values": normal(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}


def family(
    config: Any, tokens: Sequence[int], arguments: Callable[[], dict[str, torch.Tensor]], text: Any, vision: Any, **fields: Any
) -> Family:
    types = fields.pop("types", None)
    made = {"text_config": {**TEXT, **text}, "vision_config": {**VISION, **vision}}
    return Family(lambda: config(**made, **fields), tokens, arguments, types)


def tiled(config: Any) -> Family:
    """Idefics3 and its successor read a picture in tiles, those of several pictures in one list."""
    found = family(config, [PIXELS] * 16, tiles, LLAMA, {"image_size": 32}, scale_factor=2, pad_token_id=0, **ID)
    return replace(found, joined=1)


def qwen(config: Any, sections: Mapping[str, Any] = SECTIONS, **vision: Any) -> Family:
    fields = {"tie_word_embeddings": False, "video_token_id": 291, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE}
    text = {**TEXT, "rope_parameters": {**sections}}
    made = {"text_config": text, "vision_config": {**GRID, "num_heads": 2, **vision}, **fields, **ID}
    return Family(lambda: config(**made), [PIXELS] * 8, grid, "mm_token_type_ids")


LLAMA = {"model_type": "llama"}
ID, INDEX = {"image_token_id": PIXELS}, {"image_token_index": PIXELS}
# If the head is tied to the embedding, a model repeats its last token.
GEMMA3 = {"mm_tokens_per_image": 16, "tie_word_embeddings": False, "types": "token_type_ids", **INDEX}
GEMMA4 = {"audio_config": None, "video_token_id": 291, "audio_token_id": 294, "tie_word_embeddings": False, **ID}
GEMMA4_TEXT = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6}
GEMMA4_TEXT |= {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
GEMMA4_TEXT |= {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
GEMMA4_VISION = {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 64}
INTERN_VISION = {"image_size": [16, 16], "patch_size": [PATCH, PATCH]}
INTERN = {"image_seq_length": 4, "downsample_ratio": 0.5, **ID}
LLAMA4_TEXT: dict[str, Any] = {"intermediate_size_mlp": 96, "num_local_experts": 2, "interleave_moe_layer_step": 2}
LLAMA4_TEXT |= {"attention_chunk_size": 256, "no_rope_layers": [1, 1, 0]}
LLAMA4_VISION = {"intermediate_size": 128, "image_size": 16, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 32}
LLAMA4_VISION |= {"projector_input_dim": 32, "projector_output_dim": 32}
CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 16}
PIXTRAL = {"model_type": "pixtral", "image_size": 64, "head_dim": 16}
QWEN3: dict[str, Any] = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 64}
QWEN2_5: dict[str, Any] = {"window_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
MROPE = {**SECTIONS, "mrope_interleaved": True}
ROW = [PIXELS] * 2
FAMILIES = {
    "gemma3": family(
        transformers.Gemma3Config,
        [PIXELS] * 16,
        image(32),
        {**WINDOWS, "query_pre_attn_scalar": 16},
        {"image_size": 32},
        **GEMMA3,
    ),
    "gemma4": family(
        transformers.Gemma4Config, [PIXELS] * 8, patches, GEMMA4_TEXT, GEMMA4_VISION, types="mm_token_type_ids", **GEMMA4
    ),
    "idefics3": tiled(transformers.Idefics3Config),
    "internvl": family(transformers.InternVLConfig, [PIXELS] * 4, image(16), {"model_type": "qwen2"}, INTERN_VISION, **INTERN),
    "llama4": family(transformers.Llama4Config, [PIXELS] * 4, image(16), LLAMA4_TEXT, LLAMA4_VISION, **INDEX),
    "llava": family(transformers.LlavaConfig, [PIXELS] * 16, image(16), LLAMA, CLIP, image_seq_length=16, **INDEX),
    "mistral3": family(
        transformers.Mistral3Config,
        [*ROW, SEPARATOR, *ROW],
        sized,
        {"model_type": "mistral"},
        PIXTRAL,
        spatial_merge_size=2,
        **INDEX,
    ),
    "qwen2_vl": qwen(transformers.Qwen2VLConfig, depth=2, embed_dim=32, hidden_size=64, mlp_ratio=2),
    "qwen2_5_vl": qwen(transformers.Qwen2_5_VLConfig, depth=2, hidden_size=32, intermediate_size=48, **QWEN2_5),
    "qwen3_vl": qwen(transformers.Qwen3VLConfig, MROPE, depth=3, hidden_size=32, intermediate_size=48, **QWEN3),
    "smolvlm": tiled(transformers.SmolVLMConfig),
}
