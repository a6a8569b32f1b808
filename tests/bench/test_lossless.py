"""Divergences are found, with their position and margin."""

import math

import pytest

from bench.decode import encode
from bench.lossless import first_difference, run, tie_margin
from bench.plan import Plan
from outrider.drafters.none import NoDrafter
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load
from outrider.verify.decode import decode
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier

PROMPT = "def read_file(path):\n"


@pytest.mark.slow
def test_nothing_diverges_in_float32(exact: Settings) -> None:
    assert run(exact, Plan(["trigram", "fusion"], [PROMPT], [0.0, 0.8], 24, 1)) == []


@pytest.mark.slow
def test_a_divergence_has_a_position_and_a_margin(exact: Settings) -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    runtime = load(exact)
    prompt = encode(runtime, PROMPT)
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=3)):
        verifier = Verifier(runtime.runner, runtime.runner.new_cache())
        plain = decode(verifier, NoDrafter(), prompt, DecodeOptions(params, 6)).tokens
        other = [*plain[:4], (plain[4] + 1) % 4096]
        assert tie_margin(runtime, prompt, plain, other, 4, params) > 0  # plain decoding took the higher one
        assert math.isnan(tie_margin(runtime, prompt, plain, plain[:5], 5, params))
