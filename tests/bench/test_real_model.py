"""The benchmarks of SmolLM2 that run in this process, on one question of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import formats
from outrider.models import smollm2

CATEGORIES = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")
TEXT = "Paris is the capital of France, and Rome is the capital of Italy. Repeat this sentence two times."

pytestmark = [pytest.mark.slow, pytest.mark.real]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Questions like Spec-Bench's."""
    try:
        smollm2.locate()
    except FileNotFoundError:
        pytest.skip("SmolLM2 is not installed")
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps({"category": each, "turns": [TEXT]}) + "\n" for each in CATEGORIES))
    return file


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_formats(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ("float32", "int8", "the file's blocks")
    for name, value in {
        "ROUNDS": 1,
        "CONTEXTS": (64,),
        "PROMPT_ROWS": 32,
        "FORMATS": {name: formats.FORMATS[name] for name in wanted},
    }.items():
        monkeypatch.setattr(formats, name, value)
    formats.main(prompts, 40, tmp_path / "out.json")
    rows = {row["format"]: row for row in read(tmp_path / "out.json")["rows"]}
    assert tuple(rows) == wanted
    assert rows["float32"]["more_nats"] == 0 and abs(rows["int8"]["more_nats"]) < 0.05
    assert rows["the file's blocks"]["weights_mb"] < rows["int8"]["weights_mb"] < rows["float32"]["weights_mb"]
