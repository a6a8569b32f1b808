"""Questions by task, figures of pairs, and the whole benchmark on the small chat model."""

import json
from pathlib import Path

import httpx
import pytest

from bench.http.chat import Answer
from bench.live import Choice, figures, fitting, parse_tasks, read_tasks, run, summaries
from bench.plan import BenchError
from tests.hub import installed


def write(path: Path, *categories: str) -> Path:
    lines = [json.dumps({"category": name, "turns": [f"{name} {i}", "second"]}) for i, name in enumerate(categories)]
    path.write_text("\n".join(lines))
    return path


def answers(seconds: list[float], ids: list[int]) -> list[Answer]:
    return [Answer(8, each, ids, 4, each / 2) for each in seconds]


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


def test_questions_that_leave_no_room_are_passed_over(tmp_path: Path) -> None:
    def tokenize(request: httpx.Request) -> httpx.Response:
        text = json.loads(request.content)["messages"][0]["content"]
        return httpx.Response(200, json={"count": len(text), "max_model_len": 20})

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(tokenize))
    texts = ["too long for it", "first", "second"]
    assert fitting(client, texts, Choice(tmp_path, 1, ["none"], [0.0], 10)) == ["first", "second"]
    with pytest.raises(BenchError, match="Only 2 questions"):
        fitting(client, texts, Choice(tmp_path, 2, ["none"], [0.0], 10))


def test_a_burst_of_noise_does_not_move_a_median_of_pairs() -> None:
    none, fusion = figures({"none": answers([1.0, 2.0, 4.0], [1, 2]), "fusion": answers([0.5, 1.0, 8.0], [1, 2])})
    assert (none["tokens_per_second"], none["first_token_ms"], none["tokens_per_step"]) == (3.43, 1000.0, 2.0)
    assert none["ms_per_token_after_prompt"] == pytest.approx(1e3 * 3.5 / 21, abs=1e-3)
    assert "over_none" not in none
    assert (fusion["over_none"], fusion["same_as_none"]) == (2.0, "3/3")


def test_answers_that_differ_are_counted_and_tasks_are_pooled() -> None:
    part = {"none": answers([1.0], [1, 2]), "fusion": answers([1.0], [1, 3])}
    found = list(summaries({("qa", 0.0): part, ("rag", 0.0): part, ("qa", 0.8): part}))
    assert [(each["task"], each["temperature"], each["questions"]) for each in found] == [
        ("qa", 0.0, 1),
        ("rag", 0.0, 1),
        ("all", 0.0, 2),
        ("qa", 0.8, 1),
    ]
    assert [each["rows"][1]["same_as_none"] for each in found] == ["0/1", "0/1", "0/2", "0/1"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed()
    prompts = write(tmp_path / "q.jsonl", *["writing"] * 3, *["qa"] * 3, "rag")
    flags = ["--model.threads", "1", "--speculation.max_nodes", "12"]  # no costs are measured
    run(None, flags, Choice(prompts, 2, ["none", "trigram"], [0.0, 0.8], 16, "chat,qa"), tmp_path / "live.json")
    saved = json.loads((tmp_path / "live.json").read_text())
    found = [(part["task"], part["temperature"]) for part in saved["parts"]]
    assert found == [("chat", 0.0), ("chat", 0.8), ("qa", 0.0), ("qa", 0.8)]
    assert [part["task"] for part in saved["summary"]] == ["chat", "qa", "all"] * 2
    for summary in saved["summary"]:
        none, drafted = summary["rows"]
        assert (none["drafter"], none["tokens_per_step"], drafted["drafter"]) == ("none", 1.0, "trigram")
        assert drafted["same_as_none"] == f"{summary['questions']}/{summary['questions']}"
    printed = capsys.readouterr().out
    assert "all, temperature 0.8, 4 questions" in printed
    assert max(map(len, printed.splitlines())) <= 80
