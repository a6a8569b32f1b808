"""llama-server's `samplers`: the list of the samplers that a request uses; the others are off."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from outrider.server.openai.fields import MAX_PARTS
from outrider.verify.sampling_params import SamplingParams

# Pairs that give another distribution in the other order. Min-p before the temperature is another min-p after it.
ORDERED = {("penalties", name) for name in ("top_k", "temperature", "top_p", "min_p", "infill")} | {
    ("top_k", "top_p"),
    ("temperature", "top_p"),
    ("top_p", "min_p"),
    ("top_p", "infill"),
}
# These values switch samplers off.
OFF: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    "top_k": {"top_k": 0},
    "temperature": {"temperature": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
# llama-server's infill sampler drops tokens with a probability below this; this min-p keeps at least the others.
INFILL_MIN_P = 0.2

Sampler = Literal[
    "penalties", "top_k", "temperature", "top_p", "min_p", "infill", "dry", "top_n_sigma", "typ_p", "xtc"
]  # the last four are off by default, and their parameters are rejected


def check_order(samplers: list[Sampler]) -> list[Sampler]:
    """The list. Raises ValueError if its order would give another distribution than the order of this server."""
    for first, second in combinations(dict.fromkeys(samplers), 2):
        if (second, first) in ORDERED:
            raise ValueError(f"{second!r} is applied before {first!r} on this server; list it first")
    return samplers


Samplers = Annotated[list[Sampler], Field(max_length=MAX_PARTS, fail_fast=True), AfterValidator(check_order)]


def select(params: SamplingParams, samplers: Sequence[Sampler]) -> SamplingParams:
    """The parameters with all samplers but these switched off."""
    for name, values in OFF.items():
        if name not in samplers:
            params = replace(params, **values)
    early = samplers[: samplers.index("temperature")] if "temperature" in samplers else ()
    fractions = {"min_p": params.min_p, "infill": INFILL_MIN_P}
    kept = [
        fractions[name] ** (1 / params.temperature if name in early and params.temperature else 1)
        for name in samplers
        if name in fractions
    ]
    return replace(params, min_p=max(kept, default=0.0))
