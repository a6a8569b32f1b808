"""Ollama's answers: the same message however the text is cut, whole calls, reasons and times; and how durations are written."""

import math
from typing import Any

import pytest

from outrider.drafters.sequence import Finish
from outrider.server.chat.reasoning_parser import ReasoningParser
from outrider.server.chat.tools import tool_parser
from outrider.server.http.errors import APIError
from outrider.server.ollama.formatter import AnswerFormatter, Times
from outrider.server.ollama.schema import AnswerBody, ChatRequest, GenerateRequest, seconds_of
from outrider.server.openai.usage import Usage
from tests.server.fakes import VOCABULARY
from tests.server.openai.test_output_parser import output

CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": [1, "b"]}}}}\n</tool_call>'
ANSWER = f"<think>why</think>So:\n{CALL.format('f')}\n{CALL.format('g')}"
USAGE = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=9)
CHAT = ChatRequest.model_validate({"model": "m", "messages": []})


def formatter(body: AnswerBody = CHAT) -> AnswerFormatter:
    def new_parser() -> ReasoningParser:
        return ReasoningParser(tool_parser("hermes"), may_reason=True)

    return AnswerFormatter(body, VOCABULARY, new_parser, Times(0.0, 0.5, 1.0), {"first_token_ms": 1500.0})


def streamed(pieces: list[str], finish: Finish = "stop", body: AnswerBody = CHAT) -> list[Any]:
    """The lines of a streamed answer, one output per piece."""
    made = formatter(body)
    events = made.start()
    for piece in pieces:
        events += made.deltas(output(piece))
    return [event.data for event in events + made.deltas(output("", finish)) + made.end(USAGE)]


def built(lines: list[Any]) -> dict[str, Any]:
    """The message that a client builds from the lines."""
    message: dict[str, Any] = {"content": "", "thinking": "", "calls": []}
    for line in lines:
        message["content"] += line["message"]["content"]
        message["thinking"] += line["message"].get("thinking", "")
        message["calls"] += [call["function"] for call in line["message"].get("tool_calls", [])]
    return message


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, len(ANSWER)])
def test_lines_build_the_message_at_every_cut(size: int) -> None:
    lines = streamed([ANSWER[start : start + size] for start in range(0, len(ANSWER), size)])
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    message = built(lines)
    assert message == built([formatter().body([output(ANSWER, "stop")], USAGE)])
    assert (message["content"].strip(), message["thinking"]) == ("So:", "why")
    arguments = {"a": [1, "b"]}
    assert message["calls"] == [{"index": index, "name": name, "arguments": arguments} for index, name in enumerate(("f", "g"))]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_last_line_has_times_and_counts(finish: Finish) -> None:
    last = streamed(["Hi"], finish)[-1]
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, finish, "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (12, 9)
    assert (last["load_duration"], last["prompt_eval_duration"]) == (10**9, 10**9)
    parts = sum(last[f"{name}_duration"] for name in ("load", "prompt_eval", "eval"))
    assert abs(last["total_duration"] - parts) < 10  # nanoseconds


def test_generated_text_is_no_message() -> None:
    lines = streamed(["Hi"], body=GenerateRequest.model_validate({"model": "m", "prompt": "x"}))
    assert [line["response"] for line in lines] == ["Hi", ""] and "message" not in lines[0]


def test_an_error_is_a_line() -> None:
    [line] = formatter().error(APIError(503, "lost"))
    assert line.encode() == b'{"error":"lost"}\n'


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (2.5, 2.5),
        ("0", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        (-1, math.inf),
        ("-1m", math.inf),
        (10**400, math.inf),
    ],
)
def test_durations(given: Any, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", True, [], "5mm"])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(ValueError, match="a number of seconds, or a duration"):
        seconds_of(given)
