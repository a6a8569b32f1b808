"""The decoding benchmarks on the embedded model: peers say the same tokens, forced answers come out, differences are found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.decode import encode, run
from bench.lossless import first_difference, tie_margin
from bench.lossless import run as verify_lossless
from bench.model.forced import forced_answer, select_fitting
from bench.model.shapes import SHAPES
from bench.model.steps import make_runner
from bench.plan import BenchError, Plan
from bench.recordings import Line
from drafters.none import NoDrafter
from drafters.registry import Resources
from server.settings import Settings, load_settings
from server.worker.runtime import load
from verify.decode import DecodeOptions, decode
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier

PROMPT = "def read_file(path):\n"


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    costs = str(tmp_path_factory.mktemp("costs"))
    return load_settings(None, {"model.dtype": "float32", "speculation.cost_folder": costs, "model.threads": "1"})


def test_peers_say_the_same_when_greedy(exact: Settings, tmp_path: Path) -> None:
    plan = Plan(["none", "fusion"], [PROMPT], [0.0], 24, 1)
    figures = run(exact, plan, tmp_path / "r.json", with_peers=True)
    rows = {row["drafter"]: row for row in figures["results"]}
    assert set(rows) == {"none", "fusion", "transformers", "transformers-lookup", "transformers-assistant"}
    assert {row["same_tokens_as_first"] for row in rows.values()} == {"1/1"}
    assert rows["fusion"]["tokens_per_step"] > rows["none"]["tokens_per_step"] == 1.0
    assert rows["none"]["weights_read_gb_per_second"] > 0
    assert json.loads((tmp_path / "r.json").read_text())["results"] == figures["results"]


def test_nothing_diverges_in_float32(exact: Settings) -> None:
    assert verify_lossless(exact, Plan(["trigram", "fusion"], [PROMPT], [0.0, 0.8], 24, 1)) == []


def test_a_divergence_is_placed_and_weighed(exact: Settings) -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    runtime = load(exact)
    prompt = encode(runtime, PROMPT)
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=3)):
        verifier = TreeVerifier(runtime.runner, runtime.runner.new_cache())
        plain = decode(verifier, NoDrafter(), prompt, DecodeOptions(params, 6)).tokens
        other = [*plain[:4], (plain[4] + 1) % 4096]
        assert tie_margin(runtime, prompt, plain, other, 4, params) > 0  # plain decoding took the higher one
        assert math.isnan(tie_margin(runtime, prompt, plain, plain[:5], 5, params))


@pytest.mark.parametrize("name", ["none", "lookup", "fusion"])
def test_a_forced_answer_comes_out_in_fewer_steps(tiny_runner: ModelRunner, name: str) -> None:
    answer = np.array([5, 6, 7, 8, 9, 10] * 6, np.int32)
    line = Line(np.array([5, 6, 7, 8, 9, 10, 5], np.int32), answer)
    decoded = forced_answer(tiny_runner, name, Resources(vocabulary=98), line, 16, None)  # type: ignore[arg-type]
    assert decoded.tokens == answer.tolist()
    assert len(decoded.steps) == len(answer) if name == "none" else len(decoded.steps) < 20


def test_mistakes_are_sentences(exact: Settings) -> None:
    with pytest.raises(BenchError, match="no shape 'huge'"):
        make_runner("huge", exact)
    with pytest.raises(BenchError, match="fits the context"):
        select_fitting([Line(np.zeros(3, np.int32), np.zeros(100, np.int32))], 100)
    assert all(shape().num_hidden_layers > 1 for shape in SHAPES.values())
