"""Messages: content parts as text, and the format for chat templates."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.openai.conversation import Message, content_text, parse_arguments


def message(**fields: Any) -> Message:
    return Message.model_validate({"role": "user", **fields})


def test_content_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, {"type": "input_text", "text": "c"}]
    assert content_text(message(content=parts).content) == "abc"
    assert content_text("abc") == "abc"
    assert content_text(None) == ""


def test_unsupported_content_parts_are_rejected_by_type() -> None:
    for part, name in (({"type": "picture"}, "picture"), ("text", "None")):
        with pytest.raises(ValidationError, match=name):
            message(content=[part])


def test_messages_for_the_template() -> None:
    assert message(role="developer", content="x").rendered() == {"role": "system", "content": "x"}
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    rendered = message(role="assistant", tool_calls=calls, reasoning_content="why").rendered()
    assert rendered["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (rendered["content"], rendered["reasoning_content"]) == ("", "why")
    assert message(role="tool", tool_call_id="1", content="r").rendered()["tool_call_id"] == "1"


def test_arguments_that_are_not_json_stay_text() -> None:
    assert parse_arguments('{"a": [1]}') == {"a": [1]}
    assert parse_arguments("{a") == "{a"
    assert parse_arguments("[" * 100_000) == "[" * 100_000


def test_types_are_strict() -> None:
    with pytest.raises(ValidationError):
        message(content=5)
