"""The cost curve is measured once and saved; a damaged file is measured again, and a disturbed point as well."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from outrider import models
from outrider.drafters.interface import MAX_NODES
from outrider.verify import measurement
from outrider.verify.cost import CostCurve, parse
from outrider.verify.measurement import (
    NODES,
    load_or_measure,
    measure,
)
from outrider.verify.model import backend
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.torch_runner import TorchRunner

CURVE = CostCurve(NODES, (64,), [[0.1] * len(NODES)], 0.01, 0.02)


def test_a_curve_is_measured_once_and_saved(tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "costs"
    curve = load_or_measure(tiny_runner, folder)
    assert (curve.seconds > 0).all()
    assert curve.seconds.shape == (len(curve.contexts), len(NODES))
    with monkeypatch.context() as patched:
        patched.setattr(measurement, "measure", lambda _: pytest.fail("measured again"))
        assert load_or_measure(tiny_runner, folder).state() == curve.state()


def test_a_curve_is_estimated_where_all_rows_cost_alike(tmp_path: Path) -> None:
    """Two steps tell it at the start; it is saved once steps have corrected it."""
    runner = backend.load_model(LoadOptions(str(models.TARGET), device="cpu", context_tokens=1024))
    curve = load_or_measure(runner, tmp_path)
    assert not list(tmp_path.iterdir())
    assert (curve.nodes[-1], curve.contexts) == (MAX_NODES, (64, 512))
    assert (np.diff(curve.seconds, axis=1) >= 0).all() and (curve.seconds > 0).all()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "[" * 100_000, '{"nodes": [], "contexts": [], "seconds": []}', "\udc80"]
)
def test_an_unusable_cost_file_is_measured_again(
    tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setattr(measurement, "measure", lambda _: CURVE)
    assert load_or_measure(tiny_runner, tmp_path).state() == CURVE.state()
    (file,) = tmp_path.iterdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(tiny_runner, tmp_path).state() == CURVE.state()
    assert [record.getMessage().startswith(str(file)) for record in caplog.records] == [True]
    assert parse(file.read_text()).state() == CURVE.state()


def test_an_unwritable_folder_is_ignored(tiny_runner: TorchRunner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert load_or_measure(tiny_runner, tmp_path / "file").contexts == measure(tiny_runner).contexts
    assert load_or_measure(TorchRunner(tiny_runner.model, 16), None).contexts == (1,)
