"""Supported architectures: logits equal transformers', trees equal their paths, and drafting is lossless."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.backend import load_model
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import prepare
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model import families
from tests.verify.model.families import compare, random_model

SIZES = families.SIZES | {"intermediate_size": 64, "max_position_embeddings": 128, "initializer_range": 0.3}
WINDOW = 5
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 8.0}
LONG_ROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
TRAINED = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
SCALED = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}}),
    "llama, yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **TRAINED}}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**SCALED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", SCALED),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
    "llama, dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": ("GptOss", {**EXPERTS, "sliding_window": WINDOW}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
}


def config_of(name: str, attention: str, **changes: Any) -> Any:
    """The configuration of a small model of the family, of SIZES but for `changes`."""
    family, extra = ARCHITECTURES[name]
    label = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    sizes = {key: value for key, value in SIZES.items() if family != "GPT2" or "_id" in key or key in ("vocab_size",)}
    return getattr(transformers, label)(**{**sizes, **extra, **changes}, attn_implementation=attention)


def make(name: str, attention: str, **changes: Any) -> Any:
    """A random float32 model of the family, of SIZES but for `changes`."""
    return random_model(config_of(name, attention, **changes), attention)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def pair(request: pytest.FixtureRequest) -> tuple[TorchRunner, Any]:
    """The model under our runner and under transformers' eager attention."""
    model, reference = make(request.param, NAME), make(request.param, "eager")
    reference.load_state_dict(model.state_dict())
    prepare(model, None)
    return TorchRunner(model, pack=True), reference


def test_logits_and_trees_equal_transformers(pair: tuple[TorchRunner, Any]) -> None:
    assert compare(*pair) < 1e-4


@pytest.mark.parametrize("family", ["Mamba", "Jamba"])
def test_an_unsupported_state_is_refused(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "state_size": 4, "use_mamba_kernels": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "attn_layer_period": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **(heads if family == "Jamba" else {}), attn_layer_offset=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"its {family}\\w+ layers keep a state of a kind that is not supported"):
        load_model(LoadOptions(str(tmp_path), device="cpu"))


def test_attention_without_the_interface_is_refused(tmp_path: Path) -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be served: none of its layers computes attention by transformers' interface"):
        load_model(LoadOptions(str(tmp_path), device="cpu"))
