"""The library's forward: transformers' logits, and the same bits for a row in a tree, in a prompt and in company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3nConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from outrider.drafters.interface import DraftTree
from outrider.verify.checkpoint import Location
from outrider.verify.model.architecture.families import FAMILIES as KNOWN
from outrider.verify.model.backend import load_model
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.codec import encode, noise_like
from outrider.verify.model.cache.host_cache import HostCache
from outrider.verify.model.cache.shape import KVDtype
from outrider.verify.model.cpu.native import loading as native
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.load_options import LoadOptions, Quantize
from outrider.verify.model.transfer import tensor_of
from tests.slow import mostly_slow
from tests.trees import trees
from tests.verify.model.cpu.native.models import FAMILIES, VARIED, build, runner_of

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
FORMATS = ["bfloat16", "int8", "int4", "int8 cache", "fp8 cache"]
EIGHT_BITS: tuple[KVDtype, ...] = ("int8", "fp8")


def runner(family: str, form: str = "float32") -> NativeRunner:
    model = build(family, torch.bfloat16 if form == "bfloat16" else torch.float32)
    quantize: Quantize = "int8" if form == "int8" else "int4" if form == "int4" else "none"
    kv_dtype: KVDtype = next((each for each in EIGHT_BITS if form == f"{each} cache"), "auto")
    return runner_of(model, quantize=quantize, kv_dtype=kv_dtype)


CASES = [
    *((family, "float32") for family in FAMILIES),
    *((family, form) for family in ("qwen3", "deepseek_v3") for form in FORMATS),
]
FAST = [*((family, "float32") for family in VARIED), *(("qwen3", form) for form in FORMATS), ("deepseek_v3", "fp8 cache")]


@pytest.fixture(scope="module", params=mostly_slow(map(" in ".join, CASES), *map(" in ".join, FAST)))
def served(request: pytest.FixtureRequest) -> NativeRunner:
    return runner(*request.param.split(" in "))


def fill(cache: HostCache, length: int, seed: int) -> None:
    """Replaces the contents with random rows, whatever they are stored as."""
    cache.fill(length)
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, str(cache.stored_dtype))
    for layer in cache.layers:
        for plane in layer:
            rows = tensor_of(plane, kind)[:, :length]
            rows.copy_(noise_like(rows, generator))


@settings(max_examples=2, deadline=None)
@given(tree=trees(nodes=20), length=st.integers(0, 130))
def test_a_path_of_a_tree_has_the_bits_of_single_steps(served: NativeRunner, tree: DraftTree, length: int) -> None:
    cache, other = served.new_cache(), served.new_cache()
    fill(cache, length, length)
    fill(other, 3, 1)
    batch = ForwardBatch.tree(7, tree)
    company = Segment(other, ForwardBatch.chain(torch.arange(5)))
    logits = served.forward_all([company, Segment(cache, batch)])[1].copy()
    path = np.flatnonzero(batch.ancestor_mask()[-1]).tolist()
    for row in path:
        alone = served.forward(cache, ForwardBatch.chain(batch.tokens[row : row + 1]))
        assert np.array_equal(alone[0], logits[row])
        cache.length += 1


def test_the_experts_that_rows_use_are_counted_once(served: NativeRunner) -> None:
    """Equal rows use the same ones, others more of them, and a dense model none."""
    count, used = served.experts or (0, 0)
    streams = [Segment(served.new_cache(), ForwardBatch.chain(torch.tensor([token]))) for token in (7, 7, 7, 20, 41, 63)]
    served.forward_all(streams[:3])
    assert served.touched == used
    served.forward_all(streams)
    assert served.touched == 0 if not count else used < served.touched <= min(count, 4 * used)


def test_a_prompt_in_pieces_has_the_bits_of_the_whole(served: NativeRunner) -> None:
    tokens, cuts = torch.arange(150) % 90, (1, 30, 94)
    cache = served.new_cache()
    whole = served.forward(cache, ForwardBatch.chain(tokens)).copy()
    held = np.concatenate([np.asarray(part).ravel() for part in cache.parts(150)])
    pieces = []
    for start, end in zip((0, *cuts), (*cuts, 150), strict=True):
        pieces.append(served.forward(cache, ForwardBatch.chain(tokens[start:end])).copy())
        cache.length = end
    assert np.array_equal(np.concatenate(pieces), whole)
    forked = served.new_cache()
    forked.fork(cache, 150)
    for each in (cache, forked):
        assert np.array_equal(np.concatenate([np.asarray(part).ravel() for part in each.parts(150)]), held)


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_rows_are_stored_as_the_codec_has_them(kv_dtype: KVDtype) -> None:
    tokens = ForwardBatch.chain(torch.arange(90))
    whole, coded = (found := runner("qwen3")).new_cache(), (other := runner("qwen3", f"{kv_dtype} cache")).new_cache()
    found.forward(whole, tokens)
    other.forward(coded, tokens)
    for exact, stored in zip(whole.layers[0], coded.layers[0], strict=True):  # the first layer, whose input is the same
        rows = torch.from_numpy(exact[:, :90]).view(getattr(torch, str(whole.stored_dtype)))
        expected = encode(rows, getattr(torch, str(coded.stored_dtype))).view(torch.uint8)
        assert np.array_equal(stored[:, :90], expected.numpy())


TOKENS = np.arange(3, 67) % 97


def test_every_family_is_tested() -> None:
    assert FAMILIES.keys() == KNOWN.keys()


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, *VARIED))
def test_a_checkpoint_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    # Of a longer context, the positions of Phi-3 are those of a long text.
    ours = native.load(LoadOptions(str(tmp_path), device="cpu", context_tokens=128), Location(str(tmp_path)))
    assert ours is not None  # else transformers would have to read it
    ours.start(128)
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS)[None]).logits[0]
    found = torch.from_numpy(ours.forward(ours.new_cache(), ForwardBatch.chain(TOKENS)))
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 1e-5 and errors.max() < 1e-3  # where values are nearly zero, a norm makes rounding large


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
