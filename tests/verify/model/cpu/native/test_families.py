"""Every family that the library computes: transformers' logits, from a checkpoint, in chunks, and after a fork."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3nConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from outrider.verify.checkpoint import Location
from outrider.verify.model.architecture.families import FAMILIES as KNOWN
from outrider.verify.model.backend import load_model
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native import loading as native
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.load_options import LoadOptions
from tests.verify.model.cpu.native.models import FAMILIES, build

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
TOKENS = np.arange(3, 67) % 97
CUT = 41


def test_every_family_is_tested() -> None:
    assert FAMILIES.keys() == KNOWN.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    # Of a longer context, the positions of Phi-3 are those of a long text.
    ours = native.load(LoadOptions(str(tmp_path), device="cpu", context_tokens=128), Location(str(tmp_path)))
    assert ours is not None  # else transformers would have to read it
    ours.start(128)
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS)[None]).logits[0]
    cache = ours.new_cache()
    whole = torch.from_numpy(ours.forward(cache, ForwardBatch.chain(TOKENS)).copy())
    errors = (whole - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 1e-5 and errors.max() < 1e-3  # where values are nearly zero, a norm makes rounding large
    ours.forward(cache, ForwardBatch.chain(TOKENS[:CUT]), logits=False)
    cache.length = CUT
    other = ours.new_cache()
    other.fork(cache, CUT)
    for each in (cache, other):
        assert np.array_equal(ours.forward(each, ForwardBatch.chain(TOKENS[CUT:])), whole[CUT:])


def check_logits(folder: Path, model: Any) -> None:
    """A checkpoint is computed by the library, with the logits of this model."""
    ours = load_model(LoadOptions(str(folder), device="cpu", context_tokens=128))
    assert isinstance(ours, NativeRunner)
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS)[None]).logits[0]
    found = torch.from_numpy(ours.forward(ours.new_cache(), ForwardBatch.chain(TOKENS)))
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_the_text_of_a_model_that_reads_pictures(tmp_path: Path) -> None:
    text = build("qwen3_5_text").config.to_dict()
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=sizes)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    check_logits(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_the_text_of_a_model_that_hears(tmp_path: Path) -> None:
    model = build("gemma3n_text")
    Gemma3nConfig(text_config=model.config.to_dict()).save_pretrained(tmp_path)
    weights = {name.replace("model.", "model.language_model.", 1): each for name, each in model.state_dict().items()}
    weights |= {"model.audio_tower.weight": torch.zeros(3), "model.embed_vision.weight": torch.zeros(3)}
    save_file({name: each for name, each in weights.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors")
    check_logits(tmp_path, model)


@pytest.mark.parametrize("fields", [{"enable_moe_block": False}, {"enable_moe_block": False, "top_k_experts": None}])
def test_experts_that_are_counted_but_not_used(fields: dict[str, Any], tmp_path: Path) -> None:
    model = build("gemma4_text", **fields)
    model.save_pretrained(tmp_path)
    check_logits(tmp_path, model)


def test_weights_that_transformers_ignores_are_ignored(tmp_path: Path) -> None:
    model = build("llama")
    model.model.layers[1].self_attn.q_norm = torch.nn.RMSNorm(16)
    model.save_pretrained(tmp_path)
    check_logits(tmp_path, model)
