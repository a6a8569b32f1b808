"""Messages: content parts as text, and the format for chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.server.openai.conversation import Message, parse_arguments


def message(**fields: Any) -> Message:
    return Message.model_validate({"role": "user", **fields})


def test_messages_for_the_template() -> None:
    assert message(role="developer", content="x").rendered() == {"role": "system", "content": "x"}
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    rendered = message(role="assistant", tool_calls=calls, reasoning_content="why").rendered()
    assert rendered["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (rendered["content"], rendered["reasoning_content"]) == ("", "why")
    assert message(role="tool", tool_call_id="1", content="r").rendered()["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *((text, {}) for text in ("", " ", "\n", "{}", "null", '"null"', "[]", '""', '" "')),
        ('{"a": [1]}', {"a": [1]}),
        ('"{\\"a\\": 1}"', {"a": 1}),  # encoded twice
        *(
            (text, {"raw_arguments": text})
            for text in ("{a", '{"a": "b', "0", "false", "[1]", "1.5", "{'a': 1}", "[" * 100_000)
        ),
    ],
)
def test_arguments_are_an_object(arguments: str, expected: dict[str, Any]) -> None:
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize("given", [None, {}, {"a": 1}, [], 5, True])
def test_arguments_that_clients_send_in_the_place_of_text(given: Any) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    [rendered] = message(role="assistant", tool_calls=[call]).rendered()["tool_calls"]
    expected = given if isinstance(given, dict) else {"raw_arguments": json.dumps(given)} if given else {}
    assert rendered["function"]["arguments"] == expected


def test_the_forms_of_calls_and_results_before_there_were_several() -> None:
    called = message(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"}).rendered()
    assert called["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    result = message(role="function", name="f", content="1").rendered()
    assert result == {"role": "tool", "name": "f", "content": "1"}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_several_names(field: str) -> None:
    assert message(role="assistant", content="a", **{field: "why"}).rendered()["reasoning_content"] == "why"


def test_what_a_message_has_and_no_template_reads_is_named() -> None:
    assert message(role="assistant", audio={"id": "a"}, thinking={"text": "x"}, reasoning="y").ignored == ["thinking", "audio"]
    assert message(role="tool", name="f", content="x", thinking=None, audio=None).ignored == []
