"""Ablations are chosen by name, saved one by one, and not measured twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.ablations import run as module
from bench.ablations.page import columns_of, tables
from bench.ablations.run import ABLATIONS, choose, run, saved, show
from bench.ablations.size import QUICK, Size
from bench.ablations.study import Ablation, Case
from bench.cli import app
from bench.plan import BenchError


def test_names_are_unique_and_every_paper_is_repeated() -> None:
    names = [ablation.name for ablation in ABLATIONS]
    assert len(set(names)) == len(names)
    assert {ablation.paper for ablation in ABLATIONS} == {"aded", "rest", "gsd", "pearl"}


def test_what_cannot_be_measured_is_left_out() -> None:
    assert choose(None, True) == list(ABLATIONS)
    assert 0 < len(choose(None, False)) < len(ABLATIONS)
    assert not any(ablation.needs_recordings for ablation in choose(None, False))
    assert [ablation.name for ablation in choose("gsd-table-3,gsd-table-1", True)] == ["gsd-table-1", "gsd-table-3"]
    with pytest.raises(BenchError, match="no ablation gsd-table-9"):
        choose("gsd-table-9", True)
    with pytest.raises(BenchError, match="need recorded answers"):
        choose("rest-table-2", False)


def counting(name: str, measured: list[str]) -> Ablation:
    """An ablation of two cases that records what is measured."""

    def measure(material: Any) -> dict[str, Any]:
        measured.append(name)
        return {"speed, GSD": 1.23456, "absent": None}

    cases = [Case({"case": case}, measure, {"paper": 2.5}) for case in ("x", "y")]
    return Ablation(name, "Table 1: speed", "It is fast.", cases, wide=name == "aded-2")


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    first, second = counting("aded-1", measured), counting("aded-2", measured)
    monkeypatch.setattr(module, "ABLATIONS", (first, second))
    run(QUICK, None, [first], tmp_path)
    results = run(QUICK, None, [first, second], tmp_path)
    assert measured == ["aded-1", "aded-1", "aded-2", "aded-2"]
    assert results["aded-2"]["rows"][0] == {"case": "x", "speed, GSD": 1.2346, "absent": None, "paper": 2.5}
    assert json.loads((tmp_path / "ablations.json").read_text())["ablations"] == json.loads(json.dumps(results))
    assert saved(tmp_path / "ablations.json", Size()) == {}
    run(QUICK, None, [first], tmp_path, again=True)
    assert len(measured) == 6
    assert list(saved(tmp_path / "ablations.json", QUICK)) == ["aded-1", "aded-2"]


def test_pages_have_rows_or_columns_of_cases() -> None:
    row = {"case": "x", "speed": 1.234, "tokens": 12345, "share": 0.012, "absent": None}
    result = {"paper": "aded", "title": "Table 1", "claim": "Fast.", "rows": [row, row | {"case": "y"}], "wide": False}
    assert tables({"aded-1": result, "rest-1": result | {"paper": "rest"}}, "aded").splitlines() == [
        "**Table 1** (`aded-1`). The paper: Fast.",
        "",
        "| case | speed | tokens | share | absent |",
        "|---|---|---|---|---|",
        "| x | 1.23 | 12,345 | 0.012 |  |",
        "| y | 1.23 | 12,345 | 0.012 |  |",
    ]
    wide = tables({"aded-1": result | {"wide": True}}, "aded").splitlines()
    assert wide[2:5] == ["| case | x | y |", "|---|---|---|", "| speed | 1.23 | 1.23 |"]


def test_tables_fit_80_columns(printed: Callable[[], str]) -> None:
    for ablation in ABLATIONS:
        if ablation.name.startswith(("aded-table-1", "gsd-figure-5a", "gsd-table-3")):
            rows = [
                {**case.labels, "acceptance, TSD": 123.4, "drafted, TSD": 0.1234, **case.published} for case in ablation.cases
            ]
            assert columns_of(rows)
            show(ablation.name, {"title": ablation.title, "rows": rows})
    assert "Table 3" in printed()


def test_recordings_need_all_of_their_files() -> None:
    done = CliRunner().invoke(app, ["ablations", "--chat", "x.jsonl"])
    assert done.exit_code == 2
    assert "--chat, --code, --corpus and --tokenizer" in done.stderr


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    record = {
        "prompt": "def add(a, b):\n",
        "response": "    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
        "category": "math",
    }
    (tmp_path / "s.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "corpus.txt").write_text("def add(a, b):\n    return a + b\n")
    from outrider import models

    flags = ["--chat", "s.jsonl", "--code", "s.jsonl", "--corpus", "corpus.txt"]
    flags = [flag if flag.startswith("--") else str(tmp_path / flag) for flag in flags]
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["ablations", "--quick", *flags, "--tokenizer", str(models.TARGET), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert list(saved(out / "ablations.json", QUICK)) == [ablation.name for ablation in ABLATIONS]
