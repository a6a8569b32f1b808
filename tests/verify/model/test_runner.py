"""A whole tree in one forward gives the logits of each path recomputed by the unmodified model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import models
from drafters.interface import DraftTree
from tests.trees import trees
from verify.errors import ModelError
from verify.model.runner import LoadOptions, ModelRunner, load_model, resolve_device, stop_ids
from verify.tokenizer import load_tokenizer


def reference(runner: ModelRunner, config: LlamaConfig) -> LlamaForCausalLM:
    """The same weights under transformers' own attention."""
    plain = LlamaConfig(**{**config.to_dict(), "attn_implementation": "eager"})
    model = LlamaForCausalLM(plain).eval()
    model.load_state_dict(runner.model.state_dict())
    return model


@settings(max_examples=40)
@given(tree=trees(), prefix=st.lists(st.integers(0, 96), min_size=0, max_size=20))
def test_tree_logits_equal_per_path_recomputation(
    tiny_runner: ModelRunner, tiny_config: LlamaConfig, tree: DraftTree, prefix: list[int]
) -> None:
    model = reference(tiny_runner, tiny_config)
    root = 7
    cache = tiny_runner.new_cache()
    if prefix:
        tiny_runner.forward(cache, torch.tensor(prefix), logits=False)
        cache.length = len(prefix)
    tokens = torch.tensor([root, *tree.tokens.tolist()])
    depths = torch.tensor([0, *tree.depths.tolist()])
    logits = tiny_runner.forward(cache, tokens, depths, torch.from_numpy(tree.ancestors))
    for row in range(-1, len(tree)):
        path = [*prefix, root, *tree.path(row)]
        with torch.inference_mode():
            expected = model(torch.tensor([path])).logits[0, -1]
        assert torch.allclose(logits[row + 1], expected, atol=1e-4)


def test_a_forward_commits_nothing(tiny_runner: ModelRunner) -> None:
    cache = tiny_runner.new_cache()
    first = tiny_runner.forward(cache, torch.tensor([1, 2, 3]))
    assert cache.length == 0
    assert torch.equal(first, tiny_runner.forward(cache, torch.tensor([1, 2, 3])))


def test_a_trained_model_loads_and_says_what_transformers_says(stories: Path) -> None:
    runner = load_model(LoadOptions(str(stories), dtype="float32", device="cpu"))
    tokenizer = load_tokenizer(str(stories))
    ids = tokenizer.encode("Once upon a time there was a")
    plain = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.tensor([ids])).logits[0]
    assert torch.allclose(runner.forward(runner.new_cache(), torch.tensor(ids)), expected, atol=1e-4)
    assert tokenizer.eos_token_id in stop_ids(runner.model, tokenizer)


def test_context_can_be_narrowed_never_widened(tiny_runner: ModelRunner) -> None:
    assert ModelRunner(tiny_runner.model, 64).context_tokens == 64
    assert ModelRunner(tiny_runner.model, 4096).context_tokens == 128


@pytest.mark.parametrize("path", ["/no/such/folder", "no-such/model"])
def test_a_missing_model_is_one_sentence(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=path) as raised:
        load_model(LoadOptions(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_mistyped_folder_is_told_from_a_hub_id(path: str) -> None:
    for load in (lambda: load_model(LoadOptions(path)), lambda: load_tokenizer(path)):
        with pytest.raises(ModelError, match="There is no folder"):
            load()


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        load_model(LoadOptions(str(tmp_path)))


def test_truncated_weights_are_one_sentence(tmp_path: Path, tiny_runner: ModelRunner) -> None:
    tiny_runner.model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="does not load"):
        load_model(LoadOptions(str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="sees no GPU"):
        resolve_device("cuda")


def test_compile_on_a_cpu_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="for GPUs"):
        load_model(LoadOptions(str(models.TARGET), device="cpu", compile="on"))


def test_numpy_rows_do_not_leak_between_caches(tiny_runner: ModelRunner) -> None:
    a, b = tiny_runner.new_cache(), tiny_runner.new_cache()
    tiny_runner.forward(a, torch.tensor([1, 2]))
    a.length = 2
    tiny_runner.forward(b, torch.tensor([50, 60]))
    b.length = 2
    one = tiny_runner.forward(a, torch.tensor([3]))[0]
    other = tiny_runner.forward(b, torch.tensor([3]))[0]
    assert not np.allclose(one, other)
