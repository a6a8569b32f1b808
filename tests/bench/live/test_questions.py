"""Spec-Bench's questions by task, and how they are rendered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.live.questions import Renderer, parse_tasks, read_tasks
from bench.plan import BenchError
from outrider import models
from outrider.verify.tokenizer import load_tokenizer


def write(path: Path, *categories: str) -> Path:
    lines = [json.dumps({"category": name, "turns": [f"{name} {i}", "second"]}) for i, name in enumerate(categories)]
    path.write_text("\n".join(lines))
    return path


def test_the_categories_of_mt_bench_are_one_task(tmp_path: Path) -> None:
    tasks = read_tasks(write(tmp_path / "q.jsonl", "writing", "coding", "math_reasoning", "rag"))
    assert tasks == {"chat": ["writing 0", "coding 1"], "math": ["math_reasoning 2"], "rag": ["rag 3"]}
    assert parse_tasks("rag,chat", list(tasks)) == ["chat", "rag"]
    assert parse_tasks("", list(tasks)) == ["chat", "math", "rag"]
    with pytest.raises(BenchError, match="no questions of the task qa"):
        parse_tasks("qa", list(tasks))


@pytest.mark.parametrize("text", ["{", '{"prompt": "x"}', '{"category": "qa", "turns": []}', "[1]"])
def test_other_files_are_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(BenchError, match=r"Cannot read questions from .*q\.jsonl"):
        read_tasks(tmp_path / "q.jsonl")


def test_questions_that_leave_no_room_are_passed_over() -> None:
    tokenizer = load_tokenizer(str(models.TARGET))
    message = [{"role": "user", "content": "short"}]
    expected = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    renderer = Renderer(str(models.TARGET), context_tokens=64, max_tokens=16)
    (question,) = renderer.first(["long " * 200, "short"], 1, 0.8)
    assert (question.prompt, question.ids.tolist(), question.temperature) == ("short", expected, 0.8)
    with pytest.raises(BenchError, match="Only 1 questions"):
        renderer.first(["long " * 200, "short"], 2, 0.8)
