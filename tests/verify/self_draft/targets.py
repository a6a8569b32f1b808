"""Targets that draft for themselves: small random models with layers to skip."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify.model.runner import ModelRunner

LAYERS = 6


def layered(config: LlamaConfig, idle: tuple[int, ...] = (), traced: bool = False, **others: Any) -> ModelRunner:
    """A random Llama of LAYERS layers, of which `idle` ones return their input."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = LAYERS
    torch.manual_seed(4)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for number in idle:
            layer: Any = model.model.layers[number]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return ModelRunner(model, traced=traced, **others)
