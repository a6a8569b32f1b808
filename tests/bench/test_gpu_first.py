"""What runs first on a GPU, without one: parts that fail, and what predictions are compared with."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from bench import gpu_first
from bench.gpu_first import PARTS, PREDICTIONS, chosen_parts, measured, run
from bench.plan import BenchError


def test_predictions_are_of_figures_that_parts_measure() -> None:
    figures: dict[str, Any] = json.loads((Path(gpu_first.__file__).parent / "results" / "gpu-h200-first.json").read_text())
    assert {each.figure.partition(".")[0] for each in PREDICTIONS} <= {*PARTS}
    assert measured(figures, "bits16.rows_64.1") > 0
    assert measured(figures, "bits16.rows_65.1") is None and measured(figures, "nothing.rows_64") is None


def test_a_part_that_raises_is_saved_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_first, "PARTS", {"memory": fail, "lossless": lambda: {"divergences": 0}})
    monkeypatch.setattr(gpu_first, "free_memory", lambda: None)
    run(["memory", "lossless"], tmp_path / "gpu.json")
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved["memory"]["error"] == "RuntimeError: out of memory" and saved["lossless"]["divergences"] == 0
    assert "lossless.divergences" in capsys.readouterr().out


def test_a_wrong_part_and_a_missing_gpu_get_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match=r"There is no part bits5; name some of machine, "):
        chosen_parts("machine,bits5")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BenchError, match="torch finds no GPU"):
        chosen_parts("")
