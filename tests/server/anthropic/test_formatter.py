"""Messages: the order of events at every cut of the text, content blocks, stop reasons and usage."""

from typing import Any

import pytest

from outrider.drafters.sequence import Finish
from outrider.server.anthropic.messages import SIGNATURE, MessageFormatter
from outrider.server.anthropic.schema import MessagesBody
from outrider.server.chat.reasoning_parser import ReasoningParser
from outrider.server.chat.tools import tool_parser
from outrider.server.openai.conversation import parse_arguments
from outrider.server.openai.usage import Usage
from tests.server.openai.test_output_parser import output

CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": [1, "b"]}}}}\n</tool_call>'
ANSWER = f"<think>why</think>So:\n{CALL.format('f')}\n{CALL.format('g')}"
INPUT = {"a": [1, "b"]}


def formatter(usage: Usage | None = None, **fields: Any) -> MessageFormatter:
    messages = [{"role": "user", "content": "x"}]
    request = MessagesBody.model_validate({"model": "m", "max_tokens": 9, "messages": messages, **fields})

    def new_parser() -> ReasoningParser:
        return ReasoningParser(tool_parser("hermes"), may_reason=True)

    return MessageFormatter(request, "msg_1", "req_1", 12, usage or Usage(), new_parser)


def data_of(pieces: list[str], finish: Finish = "stop", stop_string: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The data of all events of a streamed answer, one output per piece."""
    usage = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=9)
    streamed = formatter(usage, **fields)
    made = streamed.start()
    for piece in pieces:
        made += streamed.deltas(output(piece))
    made += streamed.deltas(output("", finish, stop_string=stop_string)) + streamed.end(usage)
    data = [event.data for event in made if isinstance(event.data, dict)]
    assert [event.name for event in made] == [each["type"] for each in data]
    return data


def message_of(data: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream's events, which must be in Anthropic's order."""
    assert [each["type"] for each in data[:2]] == ["message_start", "ping"]
    assert [each["type"] for each in data[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = {**data[0]["message"], "content": []}
    blocks: list[dict[str, Any]] = message["content"]
    arguments, is_open = "", False
    for each in data[2:-2]:
        if each["type"] == "content_block_start":
            assert not is_open and each["index"] == len(blocks)
            is_open, arguments = True, ""
            blocks.append({**each["content_block"]})
            continue
        assert is_open and each["index"] == len(blocks) - 1
        block = blocks[-1]
        if each["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = parse_arguments(arguments)
            continue
        match each["delta"]:
            case {"type": "text_delta", "text": text}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                block["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                block["signature"] = text
            case {"type": "input_json_delta", "partial_json": text}:
                arguments += text
    assert not is_open
    return {**message, **data[-2]["delta"], "usage": data[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "content": content}


def whole(text: str, finish: Finish = "stop", stop_string: str | None = None, **fields: Any) -> dict[str, Any]:
    """The message of an answer that is not streamed."""
    usage = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=9)
    return formatter(usage, **fields).body([output(text, finish, stop_string=stop_string)], usage)


def test_a_message() -> None:
    message = whole(ANSWER)
    thinking, text, first, second = message["content"]
    assert thinking == {"type": "thinking", "thinking": "why", "signature": SIGNATURE}
    assert text["type"] == "text" and text["text"].strip() == "So:"
    assert [(call["type"], call["name"], call["input"]) for call in (first, second)] == [
        ("tool_use", "f", INPUT),
        ("tool_use", "g", INPUT),
    ]
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]
    assert (message["id"], message["type"], message["role"], message["model"]) == ("msg_1", "message", "assistant", "m")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 8, 9)
    assert usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("size", range(1, len(ANSWER) + 1))
def test_events_build_the_message_at_every_cut(size: int) -> None:
    data = data_of([ANSWER[start : start + size] for start in range(0, len(ANSWER), size)])
    built, expected = message_of(data), whole(ANSWER)
    for message in (built, expected):
        message["usage"].pop("output_tokens_details")  # they depend on the cut: each output is one token
    assert without_ids(built) == without_ids(expected)


def test_the_first_event_has_the_usage_of_the_prompt() -> None:
    start = data_of(["Hi"])[0]["message"]
    assert (start["stop_reason"], start["content"]) == (None, [])
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (4, 8)
    early = formatter().start()[0].data  # before the prompt is read
    assert isinstance(early, dict) and early["message"]["usage"]["input_tokens"] == 12


@pytest.mark.parametrize(
    ("text", "finish", "stop_string", "expected"),
    [
        ("Hi", "stop", None, ("end_turn", None)),
        ("Hi", "length", None, ("max_tokens", None)),
        ("Hi", "stop", "END", ("stop_sequence", "END")),
        (CALL.format("f"), "stop", None, ("tool_use", None)),
        (CALL.format("f"), "length", None, ("max_tokens", None)),
        ("", "stop", None, ("end_turn", None)),
    ],
)
def test_stop_reasons(text: str, finish: Finish, stop_string: str | None, expected: tuple[str, str | None]) -> None:
    for message in (whole(text, finish, stop_string), message_of(data_of([text], finish, stop_string))):
        assert (message["stop_reason"], message["stop_sequence"]) == expected
        assert len(message["content"]) == (text != "")
