"""Penalties, biases and minimum lengths along a node's path."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.drafters.none import NoDrafter
from outrider.verify.decode import Decoded
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling.logits import LogitsProcessor, ProcessedLogits
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from tests.decoding import answer_of
from tests.drafts import Oracle
from tests.trees import trees

VOCABULARY = 6
STOPS = (5,)


def reference(logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
    out = []
    for token, value in enumerate(logits):
        if token in prompt or token in answer:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * answer.count(token)
        value -= params.presence_penalty * (token in answer)
        value += params.logit_bias.get(token, 0.0)
        if len(answer) < params.min_tokens and token in STOPS:
            value = -math.inf
        out.append(value)
    return out


tokens = st.integers(0, VOCABULARY - 1)
params = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 3.0])),
    min_tokens=st.integers(0, 6),
)


@settings(max_examples=150)
@given(params, st.lists(tokens, min_size=1, max_size=5), st.lists(tokens, max_size=4), trees(vocabulary=VOCABULARY, nodes=8))
def test_every_node_is_processed_along_its_own_path(
    params: SamplingParams, prompt: list[int], answer: list[int], tree: DraftTree
) -> None:
    processor = LogitsProcessor(params, np.array(prompt, np.int32), STOPS, VOCABULARY)
    for token in answer:
        processor.commit(np.array([token], np.int32))
    logits = torch.randn(len(tree) + 1, VOCABULARY, generator=torch.Generator().manual_seed(len(tree)))
    model_logits = logits.clone()
    processed = ProcessedLogits(processor, model_logits, tree, len(answer))
    found = processed[:]
    assert torch.equal(model_logits, logits)
    on_host = ProcessedLogits(processor, logits.numpy(), tree, len(answer))
    assert np.array_equal(on_host[:], found.numpy()) and torch.equal(model_logits, logits)
    assert all(np.array_equal(on_host[row], on_host[:][row]) for row in range(len(tree) + 1))
    for row in range(-1, len(tree)):
        assert torch.equal(processed[row + 1], found[row + 1])
        expected = reference(logits[row + 1].tolist(), params, prompt, [*answer, *tree.path(row)])
        assert found[row + 1].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-40, 1e-30, 1e30, 1e300])
def test_no_repetition_penalty_makes_infinite_logits(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty, logit_bias={2: -100.0, 4: 100.0})
    processor = LogitsProcessor(params, np.arange(5, dtype=np.int32), STOPS, VOCABULARY)
    found = ProcessedLogits(processor, torch.tensor([[-1e4, 0.0, 1e-30, 12.5, 1e4, 0.5]]), EMPTY, 0)[0]
    assert bool(found.isfinite().all())


def test_stop_tokens_that_are_the_whole_vocabulary_leave_a_choice() -> None:
    params, logits = SamplingParams(min_tokens=3), torch.randn(1, VOCABULARY)
    processor = LogitsProcessor(params, np.array([1], np.int32), range(VOCABULARY), VOCABULARY)
    assert torch.equal(ProcessedLogits(processor, logits, EMPTY, 0)[:], logits)


def answer(runner: TorchRunner, params: SamplingParams, known: list[int] | None = None, **options: Any) -> Decoded:
    drafter = NoDrafter() if known is None else Oracle(known, 6, 5)
    prompt = np.arange(3, 15, dtype=np.int32)
    return answer_of(runner, prompt, DecodeOptions(params, 60, **options), drafter)


RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"logit_bias": {7: 4.0, 9: -100.0}, "min_p": 0.05},
    {"logit_bias": {7: -100.0, 12: -100.0}, "top_p": 0.9},
    {"min_tokens": 20, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("rule_params", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_is_lossless_under_any_rule(tiny_runner: TorchRunner, rule_params: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4, **rule_params)
    stops = frozenset({20, 40, 60, 80})
    plain = answer(tiny_runner, params, stop_ids=stops)
    drafted = answer(tiny_runner, params, plain.tokens, stop_ids=stops)
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) < 4 or len(drafted.steps) < len(plain.steps)
    assert plain.tokens != answer(tiny_runner, SamplingParams(temperature=temperature, seed=4)).tokens
    if "min_tokens" in rule_params:
        assert len(plain.tokens) >= 20


def test_with_ignore_eos_stop_tokens_are_ordinary_tokens(tiny_runner: TorchRunner) -> None:
    every = frozenset(range(97))
    assert len(answer(tiny_runner, SamplingParams(seed=1), stop_ids=every).tokens) == 1
    assert len(answer(tiny_runner, SamplingParams(seed=1, ignore_eos=True), stop_ids=every).tokens) == 60


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_plain_decoding(tiny_runner: TorchRunner, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=2, logprobs=5, top_k=10, presence_penalty=0.5)
    plain = answer(tiny_runner, params)
    drafted = answer(tiny_runner, params, plain.tokens)

    def joined(decoded: Decoded, name: str) -> Any:
        return np.concatenate([getattr(step.logprobs, name) for step in decoded.steps])

    assert len(drafted.steps) < len(plain.steps)
    for name in ("chosen", "top"):
        assert len(joined(drafted, name)) == len(plain.tokens)
        np.testing.assert_allclose(joined(drafted, name), joined(plain, name), atol=1e-4)
    assert (joined(drafted, "top_ids") == joined(plain, "top_ids")).mean() > 0.99  # near-ties may swap
    assert np.all(np.diff(joined(plain, "top"), axis=1) <= 0)
