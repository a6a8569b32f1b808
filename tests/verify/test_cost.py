"""The cost curve is measured once and saved; a damaged file is measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify import cost
from verify.cost import NODES, load_or_measure
from verify.model.runner import ModelRunner


def test_a_curve_is_measured_once_and_saved(tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "costs"
    curve = load_or_measure(tiny_runner, folder)
    assert all(seconds > 0 for row in curve.seconds for seconds in row)
    assert [len(row) for row in curve.seconds] == [len(NODES)] * len(curve.contexts)
    with monkeypatch.context() as patched:
        patched.setattr(cost, "measure", lambda _: pytest.fail("measured again"))
        assert load_or_measure(tiny_runner, folder) == curve
    (file,) = folder.iterdir()
    file.write_text("{}")
    assert load_or_measure(tiny_runner, folder).contexts == curve.contexts


def test_an_unwritable_folder_is_ignored(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert load_or_measure(tiny_runner, tmp_path / "file").contexts == cost.measure(tiny_runner).contexts
    assert load_or_measure(ModelRunner(tiny_runner.model, 16), None).contexts == (1,)
