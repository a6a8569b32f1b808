"""Architectures by transformers: its logits, trees that equal their paths, lossless drafts, rewinding, and refusals."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outrider.drafters.interface import Drafter
from outrider.drafters.registry import Resources, make
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.backend import load_model
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import prepare
from outrider.verify.model.quantization import quantize_model
from outrider.verify.model.recurrent import states
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from tests.decoding import answer_of, check_sessions
from tests.drafts import EAGER, Chaos, Oracle
from tests.slow import mostly_slow
from tests.verify.model.families import ATTENDING, REFUSED, SERVED, build, compare, tolerance

FAST = "qwen3_5"
OTHERS = [family for family in SERVED if family not in ATTENDING]
ALL = mostly_slow(OTHERS, FAST)


@functools.cache
def runner_of(family: str) -> TorchRunner:
    model = build(family, NAME)
    prepare(model, None)
    return TorchRunner(model, pack=True)


QUICK = "llama", "phi3, longrope", "gemma3", "gpt2", "gpt_oss", "qwen3_5", "kimi_linear", "mamba2", "lfm2", "granite_hybrid"


@pytest.mark.parametrize("family", mostly_slow(SERVED, *QUICK, "deepseek_v3", "gemma4"))
def test_logits_and_trees_equal_transformers(family: str) -> None:
    assert compare(runner_of(family), build(family, "eager")) < tolerance(family)


@pytest.mark.parametrize("family", ALL)
def test_drafting_is_lossless(family: str) -> None:
    runner = runner_of(family)
    prompt = np.arange(3, 15, dtype=np.int32)
    options = DecodeOptions(SamplingParams(0.8, seed=5), 40)
    expected = answer_of(runner, prompt, options).tokens
    again = TorchRunner(build(family, NAME))  # of its own: `fusion` drafts while the target runs
    resources = Resources(EAGER, vocabulary=97, model=DraftRunner(again, 97).session)
    drafters: list[Drafter] = [Oracle(expected, 6, 4), Chaos(97), make("fusion", resources), make("draft", resources)]
    for drafter in drafters:
        drafted = answer_of(runner, prompt, options, drafter)
        assert drafted.tokens == expected
    assert len(drafted.steps) < len(expected)


@pytest.mark.parametrize("family", ALL)
def test_sessions_are_reused_forked_and_rewound_at_random_points(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
    for _ in check_sessions(runner_of(family), 3, share=0.3, added=(1, 3, 100), tokens=20):
        pass


def test_a_layer_whose_weights_are_read_by_another_is_refused() -> None:
    model = build("stablelm", NAME)
    layer = model.model.layers[0].mlp
    layer.forward = lambda rows: torch.nn.functional.linear(rows, layer.up_proj.weight.clamp(-1, 1)[:32])
    quantize_model(model, "int8", Placement(model, [torch.device("cpu")]))
    with pytest.raises(ModelError, match="its forward fails"):
        TorchRunner(model)


def test_states_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from the end, snapshots are kept at larger distances, and never more than the limit."""
    monkeypatch.setattr(states, "SNAPSHOT_BYTES", 0)
    runner = runner_of("qwen3_5")
    shape = runner.cache_shape.recurrent
    assert shape is not None and shape.snapshots == 2
    empty = torch.empty(0)
    kept: list[states.Snapshot] = []
    for length in range(256, 256 * 65, 256):
        kept.append(states.Snapshot(length, empty, empty))
        states.thin(kept, 8)
    gaps = np.diff([0, *(each.length for each in kept)])
    assert len(kept) == 8 and kept[-1].length == 256 * 64
    assert gaps[-1] == 256 and gaps[0] >= 2048


@pytest.mark.parametrize("family", REFUSED)
def test_an_unsupported_state_is_refused(family: str, tmp_path: Path) -> None:
    build(family, "eager").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"its \w+ layers keep a state of a kind that is not supported"):
        load_model(LoadOptions(str(tmp_path), device="cpu"))


def test_attention_without_the_interface_is_refused(tmp_path: Path) -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be served: none of its layers computes attention by transformers' interface"):
        load_model(LoadOptions(str(tmp_path), device="cpu"))
