"""Tables, quantiles, and the provenance of saved results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import report


def test_figures_are_formatted_and_missing_ones_are_dashes(printed: Callable[[], str]) -> None:
    columns = {"drafter": "drafter", "tokens\nper step": "tokens_per_step:.2f"}
    rows: list[dict[str, Any]] = [{"drafter": "none", "tokens_per_step": 1.0}, {"drafter": "[peer]"}]
    report.print_figures(
        "Speed", columns, rows, "A legend that is longer than one line of eighty columns and so wraps at a word."
    )
    lines = [line.rstrip() for line in printed().splitlines()]
    assert lines[1:7] == [
        "Speed",
        "           tokens",
        "drafter  per step",
        "─────────────────",
        "none         1.00",
        "[peer]          -",
    ]


def test_results_hold_their_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    monkeypatch.setattr(
        sys, "orig_argv", ["/usr/bin/python", "/usr/bin/outrider", "bench", "decode", "--prompts", str(prompts)]
    )
    report.save(tmp_path / "new" / "result.json", {"speed": 1})
    saved = json.loads((tmp_path / "new" / "result.json").read_text())
    assert saved["command"] == "outrider bench decode --prompts prompts.jsonl"
    assert saved["speed"] == 1
    assert {"machine", "commit", "date", "python", "torch", "transformers"} <= saved.keys()
