"""Invariant rows: the range is found from the kernels, and drafted answers equal plain decoding's bit for bit in bfloat16."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.interface import MAX_NODES, Verdict
from outrider.drafters.none import NoDrafter
from outrider.verify.decode import decode
from outrider.verify.errors import ModelError
from outrider.verify.model import invariance
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.invariance import ProbeResult, common_range, find, linear_layers, start
from outrider.verify.model.invariant_range import InvariantRange
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.drafts import Oracle

CONTEXT = 512


def runner_of(config: LlamaConfig, dtype: torch.dtype, traced: bool) -> TorchRunner:
    """A random model with a longer context, not started."""
    config = copy.deepcopy(config)
    config.max_position_embeddings = CONTEXT
    torch.manual_seed(1)
    return TorchRunner(LlamaForCausalLM(config).to(dtype), CONTEXT, pack=True, traced=traced, started=False)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_drafts_equal_those_of_single_tokens_bit_for_bit(
    tiny_config: LlamaConfig, dtype: torch.dtype, traced: bool
) -> None:
    runner = runner_of(tiny_config, dtype, traced)
    found = find(runner, CONTEXT)
    if found.bounds is None:
        pytest.skip("this machine's kernels depend on the number of rows")
    runner.start(CONTEXT, found.bounds)
    prompt = np.arange(3, 40, dtype=np.int32)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(seed=3, repetition_penalty=1.1),
        SamplingParams(0.8, 0.95, 20),
    ):
        seen: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        plain = decode(watched(runner, seen[False]), NoDrafter(), prompt, DecodeOptions(params, 150))
        drafted = decode(watched(runner, seen[True]), Oracle(plain.tokens, 6, 5), prompt, DecodeOptions(params, 150))
        assert drafted.tokens == plain.tokens
        assert len(drafted.steps) < len(plain.steps) / 2
        assert torch.equal(torch.cat(seen[True]), torch.cat(seen[False]))


def watched(runner: TorchRunner, seen: list[torch.Tensor]) -> Verifier:
    """A verifier that keeps the committed rows of the cache."""

    class Watched(Verifier):
        def commit(self, verdict: Verdict) -> None:
            cache, before = self.cache, self.cache.length
            super().commit(verdict)
            assert isinstance(cache, TensorCache)
            seen.append(cache.tensor[:, :, :, before : cache.length].transpose(0, 3).clone())

    return Watched(runner, runner.new_cache())


def test_a_range_ends_where_a_kernel_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compute one row, and more than 32 rows, in another order."""

    def product(self: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        reverse = rows.shape[1] == 1 or rows.shape[1] > 32
        order = range(self.in_features)[::-1] if reverse else range(self.in_features)
        return sum((rows[..., i, None] * self.weight[:, i] for i in order), torch.zeros(()))

    monkeypatch.setattr(torch.nn.Linear, "forward", product)
    shapes = [invariance.LinearShape(34, 5, torch.float32, packed=False)]
    assert common_range(shapes) == (2, 32)


def test_auto_follows_the_cost_and_on_refuses_where_it_cannot_hold(
    tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny_config, torch.float32, traced=False)
    monkeypatch.setattr(invariance, "holds", lambda *_: True)
    bounds = InvariantRange(2, 65, 4)
    for finding, in_auto in (
        (ProbeResult(bounds, 0.02), bounds),
        (ProbeResult(bounds, 0.2), None),
        (ProbeResult(None, 0.0), None),
    ):
        monkeypatch.setattr(invariance, "find", lambda *_, finding=finding: finding)
        start(runner, CONTEXT, "auto", None)
        assert runner.invariant_range == in_auto
        assert runner.draft_depth(60) == (3 if in_auto else MAX_NODES)
    with pytest.raises(ModelError, match="depend on the draft's size"):
        start(runner, CONTEXT, "on", None)
    start(runner, CONTEXT, "off", None)
    assert runner.invariance == "off"


def test_a_finding_is_saved_and_a_damaged_file_is_measured_again(
    tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner, file = runner_of(tiny_config, torch.float32, traced=False), tmp_path / "new" / "rows.json"
    calls: list[int] = []

    def counted(*_: object) -> ProbeResult:
        calls.append(1)
        return ProbeResult(InvariantRange(2, 65, 4), 0.2)

    monkeypatch.setattr(invariance, "find", counted)
    monkeypatch.setattr(invariance, "holds", lambda *_: True)
    valid = {"version": invariance.VERSION, "bounds": {"low": 1, "high": 65, "queries": 4}, "cost": 0}
    low_above_high = valid | {"bounds": {"low": 3, "high": 2, "queries": 4}}
    for damage, searches in (
        (None, 1),
        (None, 1),
        (json.dumps(valid | {"version": invariance.VERSION - 1}), 2),
        (json.dumps(valid | {"bounds": {"low": 1}}), 3),
        ("[", 4),
        ("[]", 5),
        (json.dumps(low_above_high), 6),
    ):
        if damage:
            file.write_text(damage)
        start(runner, CONTEXT, "on", file)
        assert runner.invariance == "on, 2 to 65 rows, costs 20.0% of a step"
        assert len(calls) == searches


def test_a_models_layers_are_probed_once_per_shape(tiny_runner: TorchRunner) -> None:
    assert {(shape.inputs, shape.outputs) for shape in linear_layers(tiny_runner.model)} == {
        (32, 32),
        (32, 16),
        (32, 64),
        (64, 32),
        (32, 97),
    }


@pytest.mark.parametrize("context", [16, 60])
def test_short_contexts_are_measured(tiny_config: LlamaConfig, context: int) -> None:
    runner = runner_of(tiny_config, torch.float32, traced=True)
    start(runner, context, "auto", None)
    assert runner.context_tokens == context


def test_a_finding_that_does_not_hold_any_more_is_refused(tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(tiny_config, torch.float32, traced=False)
    monkeypatch.setattr(invariance, "find", lambda *_: ProbeResult(InvariantRange(1, 65, 4), 0.0))
    monkeypatch.setattr(invariance, "tree_equals_path", lambda *_: False)
    with pytest.raises(ModelError, match="not invariant any more"):
        start(runner, CONTEXT, "auto", None)


def test_quantised_layers_are_not_probed() -> None:
    layer = torch.nn.Linear(8, 8)
    layer.weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    assert linear_layers(torch.nn.Sequential(layer, torch.nn.Linear(8, 4))) == {
        invariance.LinearShape(8, 4, torch.float32, packed=False)
    }
