"""Which model could draft for another: what it would gain, or why it cannot."""

from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from outrider import models
from outrider.server import pair
from tests.tokenizers import write_qwen


def run(*flags: str) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    pair.register(app)
    result = CliRunner().invoke(app, ["pair", *flags, "--speculation.cost_folder", "null"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_model_that_can_draft_has_a_gain_and_one_that_cannot_a_reason(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    found = run(str(models.TARGET), "--draft", str(models.DRAFT), "--draft", str(tmp_path), "--tokens", "16")
    assert "cannot draft for this target: token 0 is" in found
    [row] = [part for part in found.split(str(models.DRAFT)) if "%" in part]
    share, _, tokens, _, gain = row.split()[:5]
    assert 30 < int(share.rstrip("%")) <= 100  # trained as its draft model
    assert 1 <= int(tokens) <= pair.MOST_TOKENS
    assert float(gain) > 0
    assert ("--draft-model" in found) == (float(gain) >= pair.LEAST_GAIN)


def test_smaller_models_in_the_folder_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, model in {"target": models.TARGET, "draft": models.DRAFT}.items():
        (tmp_path / "models").mkdir(exist_ok=True)
        (tmp_path / "models" / name).symlink_to(model)
    found = run(str(tmp_path / "models" / "target"), "--tokens", "8")
    assert f"{tmp_path / 'models' / 'draft'} " in found
    assert f"{tmp_path / 'models' / 'target'} " not in found.replace(f"--model {tmp_path / 'models' / 'target'}", "")


@pytest.mark.parametrize(
    ("equal", "length", "expected"),
    [("11111", 4, 1), ("11111", 2, 2), ("00000", 3, 5), ("1101101", 3, 3), ("1", 4, 1), ("0", 4, 1)],
)
def test_steps(equal: str, length: int, expected: int) -> None:
    assert pair.steps(np.array([each == "1" for each in equal]), length) == expected


def test_the_best_length_is_that_of_the_least_time() -> None:
    costs = np.linspace(1, 1.8, 9)  # each further row costs a tenth of a step
    right, wrong = np.ones(60, np.bool_), np.zeros(60, np.bool_)
    assert pair.best_length([right], costs, 0.05).tokens == 8
    assert pair.best_length([right], costs, 0.05).speed == pytest.approx(60 / (7 * 2.2))
    assert pair.best_length([wrong], costs, 0.05).speed == pytest.approx(1 / 1.15)
    assert pair.best_length([right], costs, 2.0).speed < 1
