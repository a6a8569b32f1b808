"""Sampling parameters: which of them change the logits."""

from __future__ import annotations

import pytest

from outrider.verify.sampling_params import SamplingParams


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-46, 1e-40, 1e-30, 1e-6, 1e-5, 0.01, 1.0])
def test_only_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature).greedy == (temperature < 1e-5)


def test_the_seeds_of_choices_and_of_turns_differ() -> None:
    seeds = [SamplingParams(seed=seed).for_prompt(tokens).seed for seed in range(40) for tokens in range(1, 40)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 64 for seed in seeds)
