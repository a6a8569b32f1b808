"""Replay accepts the tokens that a verifier would accept, checked by hand on a synthetic stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.plan import BenchError, parse_drafters
from bench.recordings import Line, Recordings, load_encoder, load_stream
from bench.replay import REFERENCE, Tally, learned, replay, run, show
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import Options
from outrider.drafters.registry import Resources
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
    record["rest_reference"] = {"new_tokens": 30, "steps": 20}  # type: ignore[assignment]
    (tmp_path / "s.jsonl").write_text(json.dumps(record) + "\n")
    return tmp_path / "s.jsonl"


def test_the_whole_command(stream: Path, tmp_path: Path, printed: Callable[[], str]) -> None:
    (tmp_path / "corpus.txt").write_text("def add(a, b):\n    return a + b\n")
    names = parse_drafters("none,lookup,fusion")
    out, corpus = tmp_path / "r.json", [tmp_path / "corpus.txt"]
    figures = run(Recordings([stream], str(TARGET), corpus), names, [8, 16], Options(), out)
    rows = {(row["drafter"], row["nodes"]): row["tokens_per_step"] for row in figures["results"]}
    assert rows["REST's own run", 64] == 1.5
    assert rows["none", 8] == 1.0
    assert rows["fusion", 16] >= rows["fusion", 8] > 1.5
    assert json.loads(out.read_text())["results"] == figures["results"]
    assert REFERENCE in printed()


def test_repeated_answers_are_drafted_from_earlier_sessions(tmp_path: Path, printed: Callable[[], str]) -> None:
    words = " ".join(f"word{number}" for number in range(40))
    (tmp_path / "s.jsonl").write_text((json.dumps({"prompt": words[:12], "response": words[12:]}) + "\n") * 2)
    figures = run(Recordings([tmp_path / "s.jsonl"], str(TARGET)), ["fusion"], [64], Options(), None, learn=True)
    alone, known = figures["results"]
    assert (alone["stream"], known["stream"]) == ("s", "s, learned")
    assert known["tokens_per_step"] > 2 * alone["tokens_per_step"]


def test_nothing_is_learned_without_earlier_sessions() -> None:
    [store] = learned(Resources(vocabulary=200), []).corpus
    assert store.tokens == 0


def test_tables_fit_80_columns(printed: Callable[[], str]) -> None:
    row = {"stream": "gpt-4-0613-arena-hard", "drafter": "prediction", "tokens_per_step": 12.3456}
    times = {"us_p50": 12345.6, "us_p99": 99999.9}
    rows = [{**row, "drafter": REFERENCE, "nodes": 64}, *({**row, "nodes": nodes, **times} for nodes in (16, 64))]
    show(rows)
    text = printed()
    assert [line.split()[1] for line in text.splitlines() if line.startswith("prediction")] == ["16", "64"]
    assert all(cell in text for cell in (REFERENCE, "12.346", "12345.6", "99999.9"))


def test_user_errors_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no drafter magic"):
        parse_drafters("none,magic")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(BenchError, match=r"Cannot read .*bad\.jsonl"):
        load_stream(tmp_path / "bad.jsonl", load_encoder(str(TARGET)), None)
