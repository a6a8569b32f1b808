"""The GPU command without a GPU: the claims, and parts that fail."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from bench.gpu import TESTS, claims, measure_parts

STEPS: dict[str, Any] = {"single_token_step_share_of_bandwidth": 0.81, "nodes_over_single": {"0": 1.0, "63": 1.2}}
FIGURES: dict[str, dict[str, Any]] = {
    "lossless": {"divergences": 0},
    "memory": {"segments_allocated_after_answers": [7, 9, 9, 9]},
    "tests": {"passed": True, "failed": []},
    "pages": {"steady": True},
    "steps": STEPS,
    "streams": {"tokens_over_one_stream": {"1": 1.0, "8": 6.0}},
    "invariance": {"holds": True, "cost": 0.02},
}
WORSE: dict[str, dict[str, Any]] = {
    "lossless": {"divergences": 1},
    "memory": {"segments_allocated_after_answers": [7, 9, 9, 10]},
    "tests": {"passed": False, "failed": ["FAILED one"]},
    "pages": {"steady": False},
    "steps": STEPS | {"single_token_step_share_of_bandwidth": 0.79},
    "streams": {"tokens_over_one_stream": {"1": 1.0, "8": 2.9}},
    "invariance": {"holds": True, "cost": 0.06},
}


def test_good_figures_support_every_claim() -> None:
    assert list(claims(FIGURES).values()) == [True] * 8


@pytest.mark.parametrize("part", FIGURES)
def test_a_worse_figure_refutes_one_claim_and_a_failed_part_is_left_out(part: str) -> None:
    assert list(claims(FIGURES | {part: WORSE[part]}).values()).count(False) == 1
    assert len(claims(FIGURES | {part: {"error": "RuntimeError: out of memory"}})) == (6 if part == "steps" else 7)


def test_the_tests_that_it_runs_exist() -> None:
    root = Path(__file__).parents[2]
    assert [name for name in TESTS if not (root / name).is_file()] == []


def test_a_part_that_raises_is_saved_and_the_others_run(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("out of memory")

    parts = {"memory": fail, "lossless": lambda: {"divergences": 0}}
    assert measure_parts(parts, tmp_path / "gpu.json") == {"drafted answers are plain decoding's": True}
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved["memory"]["error"] == "RuntimeError: out of memory"
    assert saved["claims"] == {"drafted answers are plain decoding's": True}
