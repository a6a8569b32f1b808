"""Replay accepts what a verifier would; tables, and the provenance of results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench import report
from bench.plan import parse_drafters
from bench.replay import Line, Tally, replay, run
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import Options
from outrider.models import TARGET
from tests.drafts import Oracle


def test_an_oracle_emits_its_length_plus_one_token_per_step() -> None:
    answer = np.arange(1, 30, dtype=np.int32)
    line = Line(np.array([1], np.int32), answer)
    for drafter, steps in ((NoDrafter(), 29), (Oracle(answer.tolist(), length=6), 5)):  # 1 token, then 7 per step
        tally = Tally()
        replay(drafter, line, 16, tally)
        assert (tally.tokens, tally.steps) == (29, steps)


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    record = {"prompt": "def add(a, b):\n", "response": "    return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * 3}
    (tmp_path / "s.jsonl").write_text(json.dumps(record) + "\n")
    return tmp_path / "s.jsonl"


def test_the_whole_command(stream: Path, tmp_path: Path, printed: Callable[[], str]) -> None:
    (tmp_path / "corpus.txt").write_text("def add(a, b):\n    return a + b\n")
    names = parse_drafters("none,lookup,fusion")
    out, corpus = tmp_path / "r.json", [tmp_path / "corpus.txt"]
    figures = run([stream], str(TARGET), corpus, None, names, [8, 16], Options(), out)
    rows = {(row["drafter"], row["nodes"]): row["tokens_per_step"] for row in figures["results"]}
    assert rows["none", 8] == 1.0
    assert rows["fusion", 16] >= rows["fusion", 8] > 1.5
    assert json.loads(out.read_text())["results"] == figures["results"]
    assert "fusion" in printed()


def test_repeated_answers_are_drafted_from_earlier_sessions(tmp_path: Path, printed: Callable[[], str]) -> None:
    words = " ".join(f"word{number}" for number in range(40))
    (tmp_path / "s.jsonl").write_text((json.dumps({"prompt": words[:12], "response": words[12:]}) + "\n") * 2)
    figures = run([tmp_path / "s.jsonl"], str(TARGET), [], None, ["fusion"], [64], Options(), None, learn=True)
    alone, known = figures["results"]
    assert (alone["stream"], known["stream"]) == ("s", "s, learned")
    assert known["tokens_per_step"] > 2 * alone["tokens_per_step"]


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
