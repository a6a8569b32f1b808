"""llama-server's `samplers`: the list of the samplers that a request uses; the others are off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from outrider.server.openai.fields import MAX_PARTS
from outrider.verify.sampling_params import SamplingParams

# Samplers run in this order; those of equal rank commute.
RANKS = {"penalties": 0, "top_k": 1, "temperature": 1, "top_p": 2, "min_p": 3, "infill": 3}
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
    ranked = [name for name in samplers if name in RANKS]
    for first, second in pairwise(ranked):
        if RANKS[first] > RANKS[second]:
            raise ValueError(f"{second!r} is applied before {first!r} on this server; list it first")
    return samplers


Samplers = Annotated[list[Sampler], Field(max_length=MAX_PARTS, fail_fast=True), AfterValidator(check_order)]


def select(params: SamplingParams, samplers: Sequence[Sampler]) -> SamplingParams:
    """The parameters with all samplers but these switched off."""
    for name, values in OFF.items():
        if name not in samplers:
            params = replace(params, **values)
    return replace(params, min_p=max(params.min_p, INFILL_MIN_P)) if "infill" in samplers else params
