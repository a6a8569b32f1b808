"""LoRA adapters with random weights, saved by peft."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: PreTrainedModel, folder: Path, rank: int, projections: Sequence[str] = PROJECTIONS, seed: int = 0, **options: Any
) -> PreTrainedModel:
    """Saves an adapter of a model; returns the model with it, as peft computes it. The model itself gets the adapter, too."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=7, target_modules=list(projections), **options)
    with warnings.catch_warnings():  # it reads an attribute that transformers will rename
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, config)
    for name, weights in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weights, std=0.2)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.eval()
