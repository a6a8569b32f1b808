"""Sampling: filters, noise, the resulting distribution; penalties, biases and minimum lengths along a node's path."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.drafters.none import NoDrafter
from outrider.verify.decode import Decoded
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling.device import warp_logits
from outrider.verify.sampling.logits import LogitsProcessor, ProcessedLogits
from outrider.verify.sampling.sampler import candidates, choose, distribution, draw, gumbel
from outrider.verify.sampling_params import MIN_TEMPERATURE, SamplingParams
from outrider.verify.stream import DecodeOptions
from tests.decoding import answer_of
from tests.drafts import Oracle
from tests.trees import trees


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p and min-p for one row, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - max(logits)) / params.temperature) for i in order}
    if params.top_k:
        weights = {i: weights[i] for i in order[: params.top_k]}
    total = sum(weights.values())
    shares, mass = {}, 0.0
    for i in order:
        if i in weights and mass < params.top_p:
            shares[i] = weights[i] / total
            mass += shares[i]
    top = max(shares.values())
    shares = {i: p for i, p in shares.items() if p >= params.min_p * top}
    total = sum(shares.values())
    return [shares.get(i, 0.0) / total for i in range(len(logits))]


@given(
    st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0.05, 0.52, 0.93, 1.0]),  # no sum of equal shares, where rounding would decide
    st.integers(0, 6),
    st.sampled_from([0.0, 0.1, 0.6]),
)
def test_filters_equal_the_reference(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    params = SamplingParams(temperature, top_p, top_k, min_p)
    got = warp_logits(torch.tensor([logits]), params)[0].softmax(-1).tolist()
    assert got == pytest.approx(reference(logits, params), abs=1e-6)


def test_greedy_takes_the_argmax_and_the_first_of_ties() -> None:
    rows = np.array([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]], np.float32)
    assert [choose(row, SamplingParams(temperature=0), 0) for row in rows] == [1, 0]


def test_samples_follow_the_distribution() -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    params = SamplingParams(temperature=1.0, seed=5)
    samples = 20_000
    counts = np.bincount([choose(logits, params, position) for position in range(samples)], minlength=4)
    expected = distribution(logits, params) * samples
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # 3 degrees of freedom, p = 0.001


def test_noise_depends_on_seed_position_and_token() -> None:
    tokens = np.arange(200)
    noise = np.array([gumbel(seed, position, tokens) for seed in (0, 1, (1 << 64) - 1) for position in range(40)])
    assert len(np.unique(noise)) > 0.999 * noise.size
    assert abs(float(noise.mean()) - 0.5772) < 0.03  # Euler's constant: the mean of the Gumbel distribution
    assert np.array_equal(gumbel(7, 3, np.array([5, 90])), gumbel(7, 3, tokens)[[5, 90]])
    assert np.isfinite(noise).all()


def on_host(logits: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = logits.float().numpy()
    return found


@st.composite
def rows_of_logits(draw: st.DrawFn) -> torch.Tensor:
    """One row of logits [V] with many ties, of any size below and above a few groups, in float32 or bfloat16."""
    size = draw(st.sampled_from([1, 7, 63, 64, 130, 1000, 4096, 9001]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    logits = torch.randn(size, generator=generator) * draw(st.sampled_from([0.0, 0.1, 3.0, 30.0]))
    step = draw(st.sampled_from([0.0, 0.125, 2.0]))
    if step:
        logits = (logits / step).round() * step
    if draw(st.booleans()):
        logits[torch.rand(size, generator=generator) < 0.9] = -torch.inf
        logits[draw(st.integers(0, size - 1))] = 1.0
    return logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@settings(max_examples=30)
@given(
    rows_of_logits(),
    st.sampled_from([MIN_TEMPERATURE, 0.3, 0.8, 1.0, 1.9]),
    st.sampled_from([1e-9, 0.05, 0.5, 0.95, 1.0]),
    st.sampled_from([0, 1, 20, 64, 5000]),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.integers(0, 1 << 20),
)
def test_one_row_gives_the_same_token_as_scoring_all(
    logits: torch.Tensor, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature, top_p, top_k, min_p, seed)
    weights = warp_logits(logits[None], params)[0]
    if params.filters:
        ids, kept = candidates(on_host(logits), params)
        finite = kept > -np.inf  # `warp_logits` does not tell excluded tokens from impossible ones
        assert sorted(ids[finite].tolist()) == (weights > -torch.inf).nonzero()[:, 0].tolist()
        assert kept[finite].tolist() == weights[ids[finite]].tolist()
    assert distribution(on_host(logits), params) == pytest.approx(weights.double().softmax(-1).numpy(), abs=1e-12)
    scored = weights.numpy()
    for position in range(4):
        scores = scored + gumbel(seed, position, np.arange(len(scored)))
        assert choose(on_host(logits), params, position) == scores.argmax()
        tokens, shares = draw(on_host(logits), params, position, 3)
        expected = [token for token in np.argsort(-scores, kind="stable")[:3] if scores[token] > -np.inf]
        assert tokens[: len(expected)].tolist() == expected
        assert shares[: len(expected)] == pytest.approx(weights.softmax(-1).numpy()[expected], abs=1e-6)
        assert not shares[len(expected) :].any()


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-46, 1e-40, 1e-30, 1e-6, 1e-5, 0.01, 1.0])
def test_only_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature).greedy == (temperature < 1e-5)


def test_the_seeds_of_choices_and_of_turns_differ() -> None:
    seeds = [SamplingParams(seed=seed).for_prompt(tokens).seed for seed in range(40) for tokens in range(1, 40)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 64 for seed in seeds)


VOCABULARY = 6
STOPS = (5,)


def reference_of_rules(logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
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
        expected = reference_of_rules(logits[row + 1].tolist(), params, prompt, [*answer, *tree.path(row)])
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
