"""Tools of responses, and the choice among them, become a chat's."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.openai.conversation import Message
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.schema import ChatBody
from tests.server.openai.responses.codex import TOOLS

HOSTED = {"type": "web_search"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "g"}


def chat(tools: list[dict[str, Any]], choice: Any = None) -> ChatBody:
    body = ResponsesBody.model_validate({"model": "m", "input": "x", "tools": tools, "tool_choice": choice})
    return body.to_chat([Message(role="user", content="x")], None)


def test_hosted_tools_are_left_out() -> None:
    body = ResponsesBody.model_validate({"model": "m", "input": "x", "tools": TOOLS, "text": {"verbosity": "low"}})
    names = [tool.name for tool in body.to_chat([Message(role="user")], None).tools or ()]
    assert names == ["shell", "update_plan", "apply_patch", "mcp__docs__search"]
    hosted = ["tools.web_search", "tools.image_generation", "tools.local_shell"]
    assert body.ignored == [*hosted, "text.verbosity"]
    assert chat([HOSTED]).tools is None


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
    body = chat([FUNCTION, HOSTED, CUSTOM], choice)
    assert "".join(tool.name for tool in body.enabled_tools) == enabled
    assert "".join(tool.name for tool in body.enforced_tools) == required
