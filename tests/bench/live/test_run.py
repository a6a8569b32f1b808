"""The whole benchmark on the embedded model, its results appended part by part, and what it says about bad arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.live.run import add_part, read_parts, run
from bench.live.setup import Choice
from bench.plan import BenchError
from outrider.models import smollm2
from tests.bench.live.test_questions import write

CONFIG = Path("configs/embedded.yaml")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_are_measured_and_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        smollm2.locate()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    prompts = write(tmp_path / "q.jsonl", *["writing"] * 3, *["qa"] * 3)
    choice = Choice(prompts, 2, ["none", "trigram"], [0.0, 0.8], 16, [], "chat")
    out = tmp_path / "live.json"
    flags = ["--model.threads", "1", "--speculation.max_nodes", "12"]  # no costs are measured
    run(CONFIG, flags, choice, out)
    run(CONFIG, flags, replace(choice, only="qa", temperatures=[0.8]), out)
    saved = json.loads(out.read_text())
    found = [(part["task"], part["temperature"]) for part in saved["parts"]]
    assert found == [("chat", 0.0), ("chat", 0.8), ("qa", 0.8)]
    assert [part["task"] for part in saved["summary"] if part["temperature"] == 0.8] == ["chat", "qa", "all"]
    for summary in saved["summary"]:
        none, drafted = summary["rows"]
        assert (none["method"], none["tokens_per_step"], drafted["method"]) == ("none", 1.0, "trigram")
        assert drafted["same_as_plain"] == f"{summary['questions']}/{summary['questions']}"
        assert "same_prompts" not in none
    printed = capsys.readouterr().out
    assert "all, temperature 0.8, 4 questions" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_a_part_takes_the_place_of_an_earlier_one() -> None:
    row = {"peer": "outrider", "method": "none", "transport": "HTTP", "tokens": [2], "seconds": [1.0]}
    row |= {"first_token_seconds": [0.5], "same_as_plain": [True], "same_prompt": [True]}
    found: dict[str, list[dict[str, object]]] = {"parts": []}
    for seconds in (1.0, 2.0):
        add_part(found, {"task": "qa", "temperature": 0.0, "rows": [row | {"seconds": [seconds]}]})
    assert len(found["parts"]) == len(found["summary"]) == 1
    assert found["summary"][0]["rows"] == [
        {"peer": "outrider", "method": "none", "transport": "HTTP", "tokens_per_second": 1.0, "ms_per_token": 1000.0}
        | {"ms_per_token_after_prompt": 1500.0, "first_token_ms": 500.0}
    ]


def test_bad_arguments_are_reported(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(BenchError, match="holds no results of this benchmark"):
        read_parts(tmp_path / "other.json")
    assert read_parts(tmp_path / "new.json") == read_parts(None) == []
