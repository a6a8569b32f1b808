"""Servers are compared on the same prompts, in turns; what cannot be compared is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.http.chat import Answer
from bench.pair.prompts import TASKS, after, apart
from bench.pair.run import Choice, Part, equality, part_rows, ratio, run
from bench.plan import BenchError
from tests.servers import Served
from tests.stand_in import answering

CHOICE = Choice(["chat", "code"], [0], [0.0], questions=2, max_tokens=24)


def test_servers_are_compared_question_by_question(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    figures = run([served.url, f"{served.url}/v1"], CHOICE, None, force=False, out=out)
    rows = figures["rows"]
    assert [(row["task"], row["server"]) for row in rows] == [(task, name) for task in ("chat", "code", "all") for name in "AB"]
    assert rows[1]["equal"] == rows[3]["equal"] == "2/2" and rows[0]["per_step"] >= 1 and rows[0]["rate"] > 0
    assert rows[4]["ratio"] == 1.0
    assert json.loads(out.read_text())["rows"] == rows
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("Servers in turns") :][:12]
    assert max(len(line.rstrip()) for line in table) <= 80
    assert re.match(
        rf"A is \d+\.\d\d times as fast as B after the first token\. A: Outrider 0\.1\.0 at {served.url}", lines[-1]
    )


def test_what_cannot_be_compared_is_refused(served: Served) -> None:
    with answering({"/v1/models": (200, '{"data": [{"id": "another"}]}')}) as other:
        with pytest.raises(BenchError, match=r"different models .*, another"):
            run([served.url, other], CHOICE, None, force=False, out=None)
        with pytest.raises(BenchError, match="answered 404"):
            run([served.url, other], CHOICE, None, force=True, out=None)
        with pytest.raises(BenchError, match="--context takes numbers of at least 0"):
            run([other, other], replace(CHOICE, contexts=[-1]), None, force=False, out=None)
        with pytest.raises(BenchError, match="two URLs or more"):
            run([other], CHOICE, None, force=False, out=None)
    with pytest.raises(BenchError, match="does not answer as a server"):
        run([served.url, other], CHOICE, None, force=False, out=None)


def test_a_text_that_comes_at_once_has_no_speed() -> None:
    """Otherwise the one that holds a call back until it is whole would be the fastest."""
    held, streamed = Answer(80, 8.0, 40, 7.99, "call", "cal"), Answer(80, 8.0, 80, 0.1, "call", "c")
    assert held.rate == 0 and streamed.rate == pytest.approx(10)
    part = Part("agent", 0, 0.0, [[held, streamed]])
    assert ratio([part], 1) is None
    first, second = part_rows(part)
    assert "rate" not in first and second["rate"] == 10 and "ratio" not in second


def test_conversations_share_no_beginning() -> None:
    question = TASKS["agent"](0)
    one, two = apart(question, "1"), apart(question, "2")
    assert one.messages[0] != two.messages[0] and one.messages[1:] == two.messages[1:] == question.messages[1:]


@pytest.mark.parametrize("task", TASKS)
def test_every_question_is_a_conversation_and_follows_as_many_tokens_as_asked(task: str) -> None:
    for number in range(4):
        question = TASKS[task](number)
        longer = after(1000, question)
        assert longer.messages[-1] == question.messages[-1] and longer.fields == question.fields
        assert 4000 < len(json.dumps(longer.messages)) - len(json.dumps(question.messages)) < 4600


def test_texts_are_compared_by_where_they_part() -> None:
    assert equality([("abc", "abd"), ("a", "a"), ("xy", "x")]) == "1/3, 1"
    assert equality([("a", "a")]) == "1/1"
