"""Bodies of /v1/responses, their tools and the choice among them become chats."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.chat.grammar_job import LENIENT
from outrider.server.openai.conversation import Message
from outrider.server.openai.responses.schema import ResponsesBody

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
    chat = request.to_chat(request.messages(earlier), "session")
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
    chat = request.to_chat(request.messages([]), None)
    assert "".join(tool.name for tool in chat.enabled_tools) == enabled
    assert "".join(tool.name for tool in chat.enforced_tools) == required


def test_hosted_tools_alone_are_no_tools() -> None:
    for choice in (None, "auto", "required"):
        request = body(tools=[HOSTED], tool_choice=choice)
        assert request.to_chat(request.messages([]), None).tools is None and request.ignored == ["tools.web_search"]
