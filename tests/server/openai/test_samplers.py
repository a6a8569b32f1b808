"""Samplers that are not listed are off, and a list in another order than the server's is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from outrider.server.openai.samplers import INFILL_MIN_P, Sampler, Samplers, select
from outrider.verify.sampling_params import SamplingParams

ADAPTER: TypeAdapter[list[Sampler]] = TypeAdapter(Samplers)
VALUES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5},
    "top_k": {"top_k": 7},
    "temperature": {"temperature": 0.3},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
}
PARAMS = SamplingParams(
    seed=5, logit_bias={1: 2.0}, **{name: value for each in VALUES.values() for name, value in each.items()}
)


@pytest.mark.parametrize("name", VALUES)
def test_a_sampler_that_is_not_listed_is_off(name: str) -> None:
    defaults = SamplingParams()
    chosen = select(PARAMS, ADAPTER.validate_python([each for each in VALUES if each != name]))
    for sampler, values in VALUES.items():
        for field, value in values.items():
            assert getattr(chosen, field) == (getattr(defaults, field) if sampler == name else value)


@pytest.mark.parametrize(
    "names",
    [
        *(["top_p", "top_k"], ["min_p", "top_p"], ["top_p", "temperature"], ["temperature", "penalties"], ["magic"], "kp"),
        *(["top_p", "min_p", "temperature"], ["min_p", "temperature", "top_p"], ["infill", "top_k", "top_p"]),
    ],
)
def test_other_orders_and_names_are_refused(names: Any) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(names)
    assert ADAPTER.validate_python(["top_k", "temperature"]) and ADAPTER.validate_python(["temperature", "top_k"])
    assert {*VALUES} < {*get_args(Sampler)}


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 1.7])
@pytest.mark.parametrize(
    "names", [["min_p", "temperature"], ["min_p", "top_k", "temperature"], ["top_k", "infill", "temperature"]]
)
def test_min_p_before_the_temperature_keeps_the_tokens_that_it_keeps_without(temperature: float, names: list[Sampler]) -> None:
    chosen = select(SamplingParams(temperature=temperature, min_p=0.15), ADAPTER.validate_python(names))
    least = INFILL_MIN_P if "infill" in names else 0.15
    for ratio in (0.01, 0.14, 0.16, 0.19, 0.21, 0.9):  # of a token's probability to the likeliest one's, before the temperature
        assert (ratio ** (1 / temperature) >= chosen.min_p) == (ratio >= least)
