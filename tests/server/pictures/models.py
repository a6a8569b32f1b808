"""Folders of small models with random weights that read pictures, complete with processor and chat template."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Gemma3Config, Qwen2_5_VLConfig, SmolVLMConfig
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from outrider import models

TURNS = (
    "{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n{content}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
PARTS = (
    "{{% for part in message.content %}}{{% if part.type == 'image' %}}{picture}{{% elif part.type == 'text' %}}"
    "{{{{ part.text }}}}{{% endif %}}{{% endfor %}}"
)
TEXT_OR_PARTS = "{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{parts}{{% endif %}}"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
TEXT = {**SIZES, "head_dim": 16, "max_position_embeddings": 1024, **IDS}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}


def template(picture: str, parts_only: bool = False) -> str:
    """A chat template that writes `picture` for a picture; with `parts_only`, it reads no content that is a text."""
    parts = PARTS.format(picture=picture)
    return TURNS.format(content=parts if parts_only else TEXT_OR_PARTS.format(parts=parts))


def tokenizer_of(chat_template: str, tokens: list[str], **named: str) -> Any:
    """The embedded model's tokenizer with further special tokens, some of them `named`."""
    tokenizer = AutoTokenizer.from_pretrained(str(models.TARGET), extra_special_tokens=named)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *tokens]})
    tokenizer.chat_template = chat_template
    return tokenizer


def save(folder: Path, config: Any, tokenizer: Any, processor: Any) -> None:
    """Writes a model; equal at each call."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)


def write_qwen(folder: Path) -> None:
    """A grid of positions, and pictures of several sizes."""
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = tokenizer_of(template("<|vision_start|><|image_pad|><|vision_end|>"), names)
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14, "window_size": 56}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), "rope_parameters": sections},
        vision_config={**vision, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    save(folder, config, tokenizer, Qwen2VLImageProcessorPil(max_pixels=16 * 28 * 28))


def write_gemma(folder: Path) -> None:
    """Pictures with line breaks around them, whose rows attend in both directions."""
    names = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_of(template("<start_of_image>"), [], **names)
    start, image, end = tokenizer.convert_tokens_to_ids([*names.values()])
    layers = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    indices = {"image_token_index": image, "boi_token_index": start, "eoi_token_index": end, "mm_tokens_per_image": 16}
    text, vision = {**TEXT, "vocab_size": len(tokenizer), **layers}, {**VISION, "image_size": 56}
    config = Gemma3Config(text_config=text, vision_config=vision, **indices, tie_word_embeddings=False)
    save(folder, config, tokenizer, Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, image_seq_length=16))
    (folder / "processor_config.json").write_text('{"processor_class": "Gemma3Processor", "image_seq_length": 16}')


def write_smolvlm(folder: Path) -> None:
    """Pictures that are cut into tiles, with tokens between them, and a template that takes parts only."""
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    names = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    tokenizer = tokenizer_of(template("<image>", parts_only=True), [*names, *rows])
    config = SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={**VISION, "image_size": 56},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    processor = SmolVLMImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    save(folder, config, tokenizer, processor)
    (folder / "processor_config.json").write_text('{"processor_class": "SmolVLMProcessor", "image_seq_len": 4}')


WRITERS: dict[str, Callable[[Path], None]] = {"qwen": write_qwen, "gemma": write_gemma, "smolvlm": write_smolvlm}


def picture(seed: int, width: int = 96, height: int = 64) -> bytes:
    """A picture of coloured squares, as a PNG file."""
    squares = np.random.default_rng(seed).integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
