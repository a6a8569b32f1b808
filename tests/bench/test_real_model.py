"""The benchmarks of SmolLM2 that run in this process, on one question of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import formats, long_contexts, sources
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


def test_sources(prompts: Path, tmp_path: Path) -> None:
    sources.main(prompts, 1, "0,1", 12, 6, "auto", "all sources, without the dice", tmp_path / "out.json")
    rows = read(tmp_path / "out.json")["rows"]
    assert [(row["temperature"], row["variant"]) for row in rows] == [
        (temperature, variant) for temperature in (0.0, 1.0) for variant in ("all sources", "without the dice")
    ]
    assert all(row["same_as_plain"] == row["answers"] == len(CATEGORIES) for row in rows)
    assert rows[0]["tokens_per_step"] == rows[1]["tokens_per_step"] > 1  # greedy answers have no dice


def test_long_contexts(prompts: Path, tmp_path: Path) -> None:
    """The recorded answers repeat their prompts, and conversations end when the context is full."""
    text = TEXT * 20
    records = [{"session": session, "prompt": text, "response": text} for session in ("a", "b")]
    stream = tmp_path / "agent.jsonl"
    stream.write_text("".join(json.dumps(record) + "\n" for record in records))
    long_contexts.main(stream, str(smollm2.locate()), prompts, 1, "0", 8, 4, tmp_path / "out.json")
    rows = read(tmp_path / "out.json")["rows"]
    agent, later, chats = ([row for row in rows if row["text"] == name] for name in dict.fromkeys(row["text"] for row in rows))
    assert [row["length"] for row in agent] == [512, 1024] and later[-1]["length"] > agent[-1]["length"]
    assert all(row["tokens_per_step"] > 5 for row in agent + later)
    assert 256 == chats[0]["length"] < chats[-1]["length"] and chats[0]["tokens_per_step"] > 1


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
