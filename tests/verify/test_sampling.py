"""Sampling: the rules against a plain reference, the noise, and the resulting distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.sampling import Sampler, gumbel, warp_logits
from verify.sampling_params import SamplingParams


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """The rules as prose has them, one row, plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - max(logits)) / params.temperature) for i in order}
    if params.top_k:
        weights = {i: weights[i] for i in order[: params.top_k]}
    total = sum(weights.values())
    kept, mass = {}, 0.0
    for i in order:
        if i in weights and mass < params.top_p:
            kept[i] = weights[i] / total
            mass += kept[i]
    top = max(kept.values())
    kept = {i: p for i, p in kept.items() if p >= params.min_p * top}
    total = sum(kept.values())
    return [kept.get(i, 0.0) / total for i in range(len(logits))]


@given(
    st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0.05, 0.52, 0.93, 1.0]),  # no share that equal logits add up to: there rounding decides
    st.integers(0, 6),
    st.sampled_from([0.0, 0.1, 0.6]),
)
def test_rules_equal_the_reference(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    params = SamplingParams(temperature, top_p, top_k, min_p)
    got = warp_logits(torch.tensor([logits]), params)[0].softmax(-1).tolist()
    assert got == pytest.approx(reference(logits, params), abs=1e-6)


def choose(logits: torch.Tensor, params: SamplingParams, positions: list[int]) -> torch.Tensor:
    return Sampler(params).choose(logits, positions)


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    assert choose(torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]]), SamplingParams(temperature=0), [0, 1]).tolist() == [1, 0]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    params = SamplingParams(temperature=1.0, seed=5)
    draws = 20_000
    chosen = choose(logits.expand(draws, -1), params, list(range(draws)))
    counts = torch.bincount(chosen, minlength=4).double()
    expected = logits[0].double().softmax(-1) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


def test_a_rule_never_lets_through_what_it_forbids() -> None:
    logits = torch.randn(500, 50, generator=torch.Generator().manual_seed(0))
    chosen = choose(logits, SamplingParams(temperature=2.0, top_k=3, seed=1), list(range(500)))
    allowed = logits.topk(3).indices
    assert bool((allowed == chosen[:, None]).any(1).all())


def test_a_choice_depends_on_its_own_row_and_position_only() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(seed=3)
    together = choose(logits, params, [4, 5, 5, 6, 6, 7])
    alone = [int(choose(logits[i : i + 1], params, [p])) for i, p in enumerate([4, 5, 5, 6, 6, 7])]
    assert together.tolist() == alone
    walked = Sampler(params)
    assert [int(walked.choose(logits[i : i + 1], [p])) for i, p in enumerate([4, 5, 5, 6, 6, 7])] == alone


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), min_size=1, max_size=6))
def test_kept_noise_is_the_positions_own(steps: list[list[int]]) -> None:
    """Whatever positions follow one another, also backwards; of so large a vocabulary, few are kept."""
    vocabulary = 20_000
    chooser = Sampler(SamplingParams(seed=3))
    for positions in steps:
        scores = chooser.scores(torch.zeros(len(positions), vocabulary), positions)
        assert torch.equal(scores, gumbel(3, positions, vocabulary, torch.device("cpu")))


def test_noise_depends_on_seed_position_and_token() -> None:
    cpu = torch.device("cpu")
    noise = torch.cat([gumbel(seed, range(40), 200, cpu) for seed in (0, 1, (1 << 64) - 1)])
    assert len(noise.unique()) > 0.999 * noise.numel()
    assert abs(float(noise.mean()) - 0.5772) < 0.03  # Euler's constant: the mean of the Gumbel distribution
    assert torch.equal(gumbel(7, [3], 100, cpu)[0], gumbel(7, [2, 3], 200, cpu)[1, :100])
    assert bool(noise.isfinite().all())
