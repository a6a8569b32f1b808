"""Shared by all tests: a tiny random model, a byte-like tokenizer's worth of ids, and one thread for torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM

from verify.model.attention import NAME
from verify.model.runner import ModelRunner

torch.set_num_threads(1)  # tiny models gain nothing from more, and busy machines lose

settings.register_profile("outrider", deadline=None)  # a first call may compile a kernel
settings.load_profile("outrider")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,  # wide, so that the choices of a random model are not near-ties
        attn_implementation=NAME,
    )


@pytest.fixture(scope="session")
def tiny_runner(tiny_config: LlamaConfig) -> ModelRunner:
    """A random Llama of two layers, float32: a real model that runs in a millisecond."""
    torch.manual_seed(0)
    return ModelRunner(LlamaForCausalLM(tiny_config))


@pytest.fixture(scope="session")
def stories() -> Path:
    """A trained model of another family than ours; skips where it is not at hand."""
    folder = SHARED / "stories260k"
    if not folder.is_dir():
        pytest.skip("the stories260k model is not on this machine")
    return folder
