"""The chat's commands and its conversation, with a scripted server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import pytest

from outrider.server.terminal.chat import HELP, Chat
from outrider.server.terminal.client import Client


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


def test_ctrl_c_keeps_what_has_been_shown(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script("begin", KeyboardInterrupt(), "more")
    run(script, "hi", KeyboardInterrupt(), "go on")
    assert capsys.readouterr().out == "begin\n(stopped)\n\nmore\n"
    assert script.bodies[1]["messages"] == [user("hi"), assistant("begin"), user("go on")]


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
