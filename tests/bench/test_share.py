"""The picture of a run on a GPU, from made-up figures, and the command without a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench import report, share
from bench.cli import register
from bench.plan import BenchError
from bench.roofline import RESULT

app = typer.Typer()
register(app)

FIGURES: dict[str, Any] = {
    "machine": "NVIDIA H100 80GB HBM3 (16 CPU cores)",
    "commit": "0123456789ab",
    "date": "2026-11-25",
    "torch": "2.13.0+cu130",
    "lossless": {"answers": 32, "divergences": 0, "margins": []},
    "steps": {
        "measured_read_gb_per_second": 3015.0,
        "single_token_step_ms": 6.174,
        "single_token_step_share_of_bandwidth": 0.71,
        "nodes_over_single": {
            "0": 1.0, "1": 1.02, "2": 1.02, "4": 1.03, "8": 1.05, "16": 1.09, "32": 1.15, "63": 1.27, "64": 1.35, "128": 1.6
        },
    },
    "streams": {"tokens_over_one_stream": {"1": 1.0, "2": 1.94, "4": 3.8, "8": 7.1}},
    "claims": {
        "the kernel agrees to bfloat16": True,
        "drafted answers are plain decoding's": True,
        "steps take no memory": True,
        "the tests pass": True,
        "a single-token step reads at 80 % of the memory's speed": False,
        "64 rows cost 1.25 times one at most": False,
        "a greedy step with feedback costs 1.05 forwards at most": True,
        "a sampled step costs 1.05 to 1.08 forwards at most": True,
        "eight streams have three times the tokens of one": True,
        "rows are invariant for 5 % of a step at most": True,
        "joining and leaving takes no memory and loses no page": True,
        "forced replay is 2.3 times plain decoding": True,
    },
}  # fmt: skip
ROOFLINE: dict[str, Any] = json.loads(RESULT.read_text())


def test_charts_have_the_prediction_beside_the_figures() -> None:
    shares, ratios, tokens = share.charts(FIGURES, ROOFLINE).values()
    assert [(bar.label, bar.is_predicted) for bar in shares] == [("measured", False), ("predicted", True)]
    labels = [bar.label for bar in ratios]
    assert labels[labels.index("63 nodes") + 1] == "predicted"
    assert [bar.value for bar in tokens] == [1.0, 1.94, 3.8, 7.1]


@pytest.mark.parametrize("steps", [{}, {"error": "OutOfMemoryError: out of memory"}])
def test_parts_that_failed_or_did_not_run_have_no_bars(steps: dict[str, str]) -> None:
    assert list(share.charts({"steps": steps}, ROOFLINE).values()) == [[], [], []]


def test_labels_and_lines() -> None:
    assert [share.counted(number, "node") for number in ("1", "2")] == ["1 node", "2 nodes"]
    assert share.speed(FIGURES) == "One token takes 6.174 ms; the memory reads 3,015 GB/s."
    assert share.speed({"steps": {"error": "OutOfMemoryError"}}) == ""


def test_equality() -> None:
    different = FIGURES | {"lossless": {"answers": 32, "divergences": 2}}
    assert share.equality(different).startswith("30 of 32")
    assert share.equality({"lossless": {"error": "ModelError"}}) == "not measured"


@pytest.mark.parametrize("figures", [FIGURES, {name: FIGURES[name] for name in ("machine", "commit", "date", "torch")}])
def test_the_picture_lies_beside_its_file(tmp_path: Path, figures: dict[str, Any]) -> None:
    image = pytest.importorskip("PIL.Image")
    result = tmp_path / "outrider-gpu.json"
    result.write_text(json.dumps(figures))
    path = share.share(result)
    assert path == tmp_path / "outrider-gpu.png"
    with image.open(path) as drawn:
        assert drawn.size == share.SIZE


def test_without_pillow_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BenchError, match="install it with"):
        share.check_pillow()


@pytest.mark.parametrize("arguments", [[], ["--share"]])
def test_without_a_gpu_the_command_is_one_sentence(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "gpu", *arguments])
    assert done.exit_code == 2
    assert "torch finds no GPU" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_part_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = CliRunner().invoke(app, ["bench", "gpu", "--only", "magic"])
    assert done.exit_code == 2
    assert "There is no part magic" in done.stderr


def test_sharing_writes_a_figure_file_and_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("PIL")
    from bench import gpu

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "machine", lambda: "a GPU")
    monkeypatch.setattr(gpu, "lossless", lambda: FIGURES["lossless"] | {})
    done = CliRunner().invoke(app, ["bench", "gpu", "--share", "--only", "lossless"])
    assert done.exit_code == 0, done.output
    assert "Share outrider-gpu.json and outrider-gpu.png." in done.output
    assert json.loads((tmp_path / "outrider-gpu.json").read_text())["lossless"]["answers"] == 32
