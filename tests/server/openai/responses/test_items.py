"""Bodies of /v1/responses, their input items, tools and choices become chats."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from outrider.server.chat.grammar_job import LENIENT
from outrider.server.openai.conversation import Message, content_text
from outrider.server.openai.responses.items import InputItems, input_item, references, to_messages, with_system
from outrider.server.openai.responses.schema import ResponsesBody
from tests.server.chat.tools.patch_grammar import PATCH
from tests.server.openai.responses.codex import INPUT

ITEMS: TypeAdapter[Any] = TypeAdapter(InputItems)


def messages(*items: dict[str, Any]) -> list[Message]:
    return to_messages(ITEMS.validate_python(list(items)))


def test_a_history_of_an_agent() -> None:
    converted = messages(*INPUT)
    roles = ["developer", "user", "user", "assistant", "tool", "assistant", "tool", "assistant", "tool", "developer", "user"]
    assert [message.role for message in converted] == roles
    shell, patch = converted[3].rendered(), converted[5].rendered()
    assert shell["reasoning_content"] == "I look first."
    assert shell["tool_calls"][0]["function"] == {"name": "shell", "arguments": {"command": ["cat", "a.py"]}}
    assert "reasoning_content" not in patch  # only its encrypted form was sent
    assert patch["tool_calls"][0] == {
        "id": "c2",
        "type": "function",
        "function": {"name": "apply_patch", "arguments": {"input": PATCH}},
    }
    assert [call.function.name for call in converted[7].tool_calls or ()] == ["mcp__docs__search"]
    assert (content_text(converted[4].content), converted[6].content) == ("x = 1\n", "Success.")


def test_reasoning_belongs_to_the_next_message_of_the_assistant() -> None:
    thought = {
        "type": "reasoning",
        "content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}],
    }
    answer, question = {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    assert [message.reasoning_content for message in messages(thought, answer, question)] == ["ab", None]
    assert [message.reasoning_content for message in messages(thought, question, answer)] == ["ab", None, None]
    (joined,) = messages(thought, answer, thought, call, thought, call)
    assert (joined.reasoning_content, len(joined.tool_calls or ())) == ("ababab", 2)


def test_many_calls_are_joined_in_linear_time() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    (joined,) = messages(*[call] * 16_000)
    assert len(joined.tool_calls or ()) == 16_000


def test_references_are_replaced_by_stored_items() -> None:
    items = ITEMS.validate_python([{"type": "item_reference", "id": "a"}, {"id": "b"}, {"role": "user", "content": "x"}])
    assert references(items) == ["a", "b"] and references("a") == []
    stored = {
        "a": input_item(
            {"id": "a", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
        ),
        "b": input_item(
            {"id": "b", "type": "custom_tool_call", "call_id": "1", "name": "g", "input": "x", "status": "completed"}
        ),
    }
    answer, question = to_messages(items, stored)
    assert (answer.reasoning_content, len(answer.tool_calls or ()), question.content) == ("why", 1, "x")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": 5}, "'type' is a string"),
        ({"role": "user", "content": [{"type": "picture"}]}, "not 'picture'"),
        ({"type": "function_call_output", "call_id": "1", "output": [{"type": "picture"}]}, "not 'picture'"),
        ({"type": "custom_tool_call", "call_id": "1"}, "Field required"),
        ({"type": "item_reference"}, "Field required"),
        ({"type": "x" * 65}, "at most 64 characters"),
    ],
)
def test_invalid_items_are_rejected(item: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        messages(item)


def test_one_system_message_comes_first() -> None:
    system, developer, user = (Message(role=role, content=role) for role in ("system", "developer", "user"))
    joined = with_system("Be short.", [developer, system, user, developer])
    assert [(message.role, message.content) for message in joined] == [
        ("system", "Be short.\n\ndeveloper\n\nsystem"),
        ("user", "user"),
        ("developer", "developer"),
    ]
    assert with_system(None, [user]) == [user]
    assert with_system("a", [])[0].content == "a"


HOSTED = {"type": "web_search"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "g"}


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "m", "input": "x", **fields})


def test_a_body_becomes_a_chat() -> None:
    earlier = [Message(role="user", content="before")]
    format = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    fields: dict[str, Any] = {"instructions": "Be short.", "max_output_tokens": 5, "reasoning": {"effort": "low"}}
    fields |= {"text": {"format": format}, "tools": [{"type": "function", "name": "f", "description": "d"}]}
    request = body(**fields, tool_choice={"type": "function", "name": "f"})
    chat = request.to_chat([*earlier, *to_messages(request.input)], "session")
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "Be short."),
        ("user", "before"),
        ("user", "x"),
    ]
    assert (chat.token_limit, chat.reasoning_effort, chat.prompt_cache_key) == (5, "low", "session")
    assert chat.structures["response_format"].kind == LENIENT  # not strict by default
    assert [tool.function.description for tool in chat.enforced_tools] == ["d"]


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"text": {"format": {"type": "json_schema"}}},
        {"input": [{"type": "item_reference"}]},
        {"input": [{"role": "user", "content": [{"type": "picture"}]}]},
        {"frequency_penalty": 0.5},
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}},
        {"truncation": "middle"},
    ],
)
def test_invalid_bodies_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        body(**fields)


@pytest.mark.parametrize(
    ("choice", "enabled", "required"),
    [
        ("auto", "fg", ""),
        ("none", "", ""),
        ("required", "fg", "fg"),
        ({"type": "function", "name": "f"}, "fg", "f"),
        ({"type": "custom", "name": "g"}, "fg", "g"),
        ({"type": "web_search_preview"}, "fg", ""),
        ({"type": "mcp", "server_label": "docs", "name": "h"}, "fg", ""),
        ({"type": "allowed_tools", "mode": "auto", "tools": [CUSTOM, HOSTED]}, "g", ""),
        ({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION, HOSTED]}, "f", "f"),
        ({"type": "allowed_tools", "mode": "required", "tools": [HOSTED]}, "", ""),
    ],
)
def test_the_choice(choice: Any, enabled: str, required: str) -> None:
    request = body(tools=[FUNCTION, HOSTED, CUSTOM], tool_choice=choice)
    chat = request.to_chat(to_messages(request.input), None)
    assert "".join(tool.name for tool in chat.enabled_tools) == enabled
    assert "".join(tool.name for tool in chat.enforced_tools) == required


def test_hosted_tools_alone_are_no_tools() -> None:
    for choice in (None, "auto", "required"):
        request = body(tools=[HOSTED], tool_choice=choice)
        assert request.to_chat(to_messages(request.input), None).tools is None and request.ignored == ["tools.web_search"]
