"""The cost curve is measured once and saved; a damaged file is measured again."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from drafters.interface import MAX_NODES
from verify import cost
from verify.cost import NODES, CostCurve, load_or_measure, parse
from verify.model.runner import ModelRunner


def test_a_curve_is_measured_once_and_saved(tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "costs"
    curve = load_or_measure(tiny_runner, folder)
    assert all(seconds > 0 for row in curve.seconds for seconds in row)
    assert [len(row) for row in curve.seconds] == [len(NODES)] * len(curve.contexts)
    with monkeypatch.context() as patched:
        patched.setattr(cost, "measure", lambda _: pytest.fail("measured again"))
        assert load_or_measure(tiny_runner, folder) == curve


CURVE = CostCurve((0, 1, MAX_NODES), (64, 512), ((0.1, 0.2, 0.3), (0.2, 0.3, 0.4)), 0.01, 0.02)


def test_a_saved_curve_is_parsed() -> None:
    assert parse(json.dumps(asdict(CURVE))) == CURVE


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": [], "contexts": [], "seconds": []},
        {"nodes": [], "seconds": [[], []]},
        {"contexts": [], "seconds": []},
        {"nodes": [0, 1, 2]},
        {"nodes": [1, 2, MAX_NODES]},
        {"nodes": [0, MAX_NODES, 1]},
        {"nodes": [0, 0, MAX_NODES]},
        {"nodes": [[0, 1, MAX_NODES]]},
        {"nodes": 3},
        {"nodes": ["a", "b", "c"]},
        {"nodes": [0, 1, 10**30]},
        {"contexts": [512, 64]},
        {"contexts": [0, 64]},
        {"contexts": None},
        {"seconds": [[0.1, 0.2, 0.3]]},
        {"row_seconds": -1.0},
        {"stream_seconds": None},
        {"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3]]},
        {"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3, 0.0]]},
        {"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3, -1.0]]},
        {"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3, float("inf")]]},
        {"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3, float("nan")]]},
        {"seconds": [[0.1, 0.2, 0.3], [0.2, 0.3, {}]]},
    ],
    ids=str,
)
def test_a_cost_file_that_is_no_curve_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|array|invalid|Error"):
        parse(json.dumps(asdict(CURVE) | changes))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "[" * 100_000, '{"nodes": [], "contexts": [], "seconds": []}', "\udc80"]
)
def test_an_unusable_cost_file_is_measured_again(
    tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setattr(cost, "measure", lambda _: CURVE)
    assert load_or_measure(tiny_runner, tmp_path) == CURVE
    (file,) = tmp_path.iterdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(tiny_runner, tmp_path) == CURVE
    assert [record.getMessage().startswith(str(file)) for record in caplog.records] == [True]
    assert parse(file.read_text()) == CURVE


def test_an_unwritable_folder_is_ignored(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert load_or_measure(tiny_runner, tmp_path / "file").contexts == cost.measure(tiny_runner).contexts
    assert load_or_measure(ModelRunner(tiny_runner.model, 16), None).contexts == (1,)


def test_a_point_that_was_disturbed_does_not_make_more_nodes_expensive() -> None:
    seconds = tuple(9.0 if nodes == 1 else 1.0 + nodes / 64 for nodes in NODES)
    found = CostCurve(NODES, (64,), (seconds,)).at(64)
    assert found[1] == found[3] == seconds[NODES.index(3)]
    assert list(found) == sorted(found)
