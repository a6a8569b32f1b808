"""The chat's commands and its conversation, with a scripted server; an answer, its text and its cost."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.server.terminal.chat import HELP, Answer, Chat
from outrider.server.terminal.client import ChatError, Client


class Script:
    """A client whose answers are given: a text, or an error after a text."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(copy.deepcopy(body))
        while self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            yield {"choices": [{"delta": {"content": answer}}]}
            if not (self.answers and isinstance(self.answers[0], BaseException)):
                return


def run(script: Script, *lines: str | BaseException) -> Chat:
    """A chat in which these lines are typed; an exception is raised instead of a line."""
    chat = Chat(cast(Client, script), "tiny")
    typed = iter(lines)

    def read() -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    chat.run(read)
    return chat


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_conversation_grows(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script("hello", "bye")
    run(script, "hi", "", "  go ")
    assert capsys.readouterr().out == "hello\nbye\n"
    assert script.bodies[1]["messages"] == [user("hi"), assistant("hello"), user("go")]
    assert script.bodies[0]["session_id"] == script.bodies[1]["session_id"]
    assert "seed" not in script.bodies[0] and script.bodies[0]["speculation"] == {"report": True}


def test_commands_change_the_request() -> None:
    script = Script("a", "b")
    run(script, "/drafter none", "/seed 7", "x", "/drafter default", "/seed none", "y")
    assert script.bodies[0]["speculation"] == {"report": True, "drafter": "none"}
    assert script.bodies[0]["seed"] == 7
    assert script.bodies[1]["speculation"] == {"report": True} and "seed" not in script.bodies[1]


def test_an_edit_sends_the_file_and_predicts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "main.py"
    file.write_text("def run(): ...\n")
    script = Script("def start(): ...", "again", "plain")
    run(script, f"/edit {file} Rename run to start.", "/again", "Thanks", f"/edit {file}", f"/edit {tmp_path}/no.py Change it.")
    first, again, plain = script.bodies
    assert first["prediction"] == again["prediction"] == {"type": "content", "content": "def run(): ...\n"}
    asked = first["messages"][0]["content"]
    assert asked.startswith("Rename run to start.") and "def run(): ...\n" in asked and asked == again["messages"][0]["content"]
    assert "prediction" not in plain
    shown = capsys.readouterr().out
    assert "Name a file and the change" in shown and "The file cannot be read" in shown


def test_ctrl_c_keeps_what_has_been_shown(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script("begin", KeyboardInterrupt(), "more")
    run(script, "hi", KeyboardInterrupt(), "go on")
    assert capsys.readouterr().out == "begin\n(stopped)\n\nmore\n"
    assert script.bodies[1]["messages"] == [user("hi"), assistant("begin"), user("go on")]


STEPS: dict[str, Any] = {"steps": 2, "mean_tokens_per_step": 2.0}
STEPS |= {"drafted_tokens": {"trigram": 5, "lookup": 1}, "accepted_tokens": {"trigram": 2}}
TOKENS = {"completion_tokens": 4, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}
USAGE: dict[str, Any] = {"usage": TOKENS, "speculation": STEPS, "choices": []}


def chunk(content: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, **fields}]}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/help", HELP),
        ("/stats", "There is no answer yet."),
        ("/nothing", "There is no command /nothing; /help lists them, and a leading space sends the line as a question."),
        ("/seed x", "The seed is a number or none, not 'x'."),
    ],
)
def test_commands_explain_themselves(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(Script(), line)
    assert capsys.readouterr().out == f"{shown}\n"


def test_text_is_shown_as_it_arrives() -> None:
    shown: list[str] = []
    answer = Answer(shown.append, clock=iter([0.0, 0.5, 2.0]).__next__)
    answer.receive(iter([chunk(""), chunk("a"), chunk("b"), {**chunk(), "usage": None}, USAGE]))
    assert (shown, answer.text) == (["a", "b"], "ab")
    assert answer.stats().splitlines() == [
        "4 tokens in 2.00 s, 2 tokens/s, first text after 500 ms",
        "9 prompt tokens, 3 of them cached",
        "2 steps, 2.00 tokens per step",
        "accepted drafts: trigram 2 of 5, lookup 0 of 1",
    ]


def test_control_characters_do_not_reach_the_terminal() -> None:
    shown: list[str] = []
    Answer(shown.append).receive(iter([chunk("a\x1b[2J\x07\u009b\n\tb")]))
    assert shown == ["a[2J\n\tb"]


@pytest.mark.parametrize(
    "malformed", [{}, {"choices": None}, {"choices": [{}]}, {"choices": [{"delta": None}]}, {"choices": ["a"]}]
)
def test_a_chunk_of_another_form_is_an_error(malformed: dict[str, Any]) -> None:
    answer = Answer(lambda _: None)
    with pytest.raises(ChatError, match="no part of a chat completion"):
        answer.receive(iter([chunk("a"), malformed]))
    assert answer.text == "a"


def test_control_characters_of_the_cost_do_not_reach_the_terminal() -> None:
    answer = Answer(lambda _: None)
    answer.receive(iter([USAGE | {"speculation": USAGE["speculation"] | {"drafted_tokens": {"\x1b[2Jx": 1}}}]))
    assert answer.stats().endswith("accepted drafts: [2Jx 0 of 1")
