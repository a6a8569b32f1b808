"""Questions by task, figures of pairs, and the whole benchmark on the small chat model."""

import gzip
import json
from pathlib import Path

import httpx
import pytest

from bench.live import Choice, fitting, parse_tasks, read_tasks, run, summaries
from bench.plan import BenchError
from bench.record import Row
from tests.hub import installed


def write(path: Path, *categories: str) -> Path:
    lines = [json.dumps({"category": name, "turns": [f"{name} {i}", "second"]}) for i, name in enumerate(categories)]
    path.write_text("\n".join(lines))
    return path


def cells(task: str, temperature: float, text: str = "same", **seconds: list[float]) -> list[Row]:
    """Answers of eight tokens; `none` says "same"."""
    known = {"task": task, "temperature": temperature, "tokens": 8, "steps": 4}
    return [
        {"question": number, "seconds": each, "first_token_seconds": each / 2, **known, **said}
        for said, times in (({"system": k, "text": "same" if k == "none" else text}, v) for k, v in seconds.items())
        for number, each in enumerate(times)
    ]


def test_each_line_says_its_task(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "code.jsonl.gz", "wt") as file:
        file.write('{"prompt": "def f():"}')
    (tmp_path / "gsm.jsonl").write_text('{"question": "How many?", "answer": "3"}')
    spec_bench = write(tmp_path / "q.jsonl", "writing", "coding", "math_reasoning", "rag")
    tasks = read_tasks([spec_bench, tmp_path / "gsm.jsonl", tmp_path / "code.jsonl.gz"])
    assert tasks.pop("code") == ["Complete this function. Answer with the code only.\n\ndef f():"]
    assert tasks == {"chat": ["writing 0", "coding 1"], "math": ["math_reasoning 2", "How many?"], "rag": ["rag 3"]}
    assert parse_tasks("rag,chat", list(tasks)) == ["chat", "rag"]
    assert parse_tasks("", list(tasks)) == ["chat", "math", "rag"]
    with pytest.raises(BenchError, match="no questions of the task qa"):
        parse_tasks("qa", list(tasks))


@pytest.mark.parametrize("text", ["{", '{"text": "x"}', '{"category": "qa", "turns": []}', "[1]"])
def test_other_files_are_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(BenchError, match=r"Cannot read questions from .*q\.jsonl"):
        read_tasks([tmp_path / "q.jsonl"])


def test_questions_that_leave_no_room_are_passed_over(tmp_path: Path) -> None:
    def tokenize(request: httpx.Request) -> httpx.Response:
        text = json.loads(request.content)["messages"][0]["content"]
        return httpx.Response(200, json={"count": len(text), "max_model_len": 20})

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(tokenize))
    texts = ["too long for it", "first", "second"]
    assert fitting(client, texts, Choice([], 2, ["none"], [0.0], 10)) == ["second", "first"]
    with pytest.raises(BenchError, match="Only 2 questions"):
        fitting(client, texts, Choice([], 3, ["none"], [0.0], 10))


def test_ratios_are_means_of_pairs() -> None:
    (part,) = summaries(cells("qa", 0.0, none=[1.0, 2.0, 4.0], fusion=[0.5, 1.0, 8.0]))
    none, fusion = part["rows"]
    assert (none["tokens_per_second"], none["first_token_ms"], none["tokens_per_step"]) == (3.43, 1000.0, 2.0)
    assert none["ms_per_token_after_prompt"] == pytest.approx(1e3 * 3.5 / 21, abs=1e-3)
    assert "over_none" not in none
    assert (fusion["over_none"], fusion["same_as_none"]) == (pytest.approx(2 ** (1 / 3), abs=1e-3), "3/3")


def test_answers_that_differ_are_counted_and_tasks_are_pooled() -> None:
    rows = [row for task in ("qa", "rag") for row in cells(task, 0.0, "other", none=[1.0], fusion=[1.0])]
    rows += cells("qa", 0.8, "other", none=[1.0], fusion=[1.0]) + cells("rag", 0.8, none=[1.0])
    found = list(summaries(rows))  # one question of the last task was not yet answered by both
    parts = [(each["task"], each["temperature"], each["questions"]) for each in found]
    assert parts == [("qa", 0.0, 1), ("rag", 0.0, 1), ("all", 0.0, 2), ("qa", 0.8, 1)]
    assert [each["rows"][1]["same_as_none"] for each in found] == ["0/1", "0/1", "0/2", "0/1"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed()
    prompts = write(tmp_path / "q.jsonl", *["writing"] * 3, *["qa"] * 3, "rag")
    out = tmp_path / "live.json"
    flags = ["--model.threads", "1", "--speculation.max_nodes", "12"]  # no costs are measured
    run(None, flags, Choice([prompts], 1, ["none", "trigram"], [0.0], 16, "chat"), out)
    (first, *_) = json.loads(out.read_text())["answers"]
    run(None, flags, Choice([prompts], 2, ["none", "trigram"], [0.0, 0.8], 16, "chat,qa"), out)
    saved = json.loads(out.read_text())
    assert saved["answers"][0] == first  # a second run goes on
    assert len(saved["answers"]) == 2 * 2 * 2 * 2
    assert [part["task"] for part in saved["summary"]] == ["chat", "qa", "all"] * 2
    for summary in saved["summary"]:
        none, drafted = summary["rows"]
        assert (none["system"], none["tokens_per_step"], drafted["system"]) == ("none", 1.0, "trigram")
        assert drafted["same_as_none"] == f"{summary['questions']}/{summary['questions']}"
    printed = capsys.readouterr().out
    assert "all, temperature 0.8, 4 questions" in printed
    assert max(map(len, printed.splitlines())) <= 80
    with pytest.raises(BenchError, match="was measured with max_tokens 16, not 8; give another file by --out"):
        run(None, flags, Choice([prompts], 2, ["none", "trigram"], [0.0], 8, "chat"), out)
