"""Messages bodies: what is accepted without effect, and what is rejected by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.anthropic.schema import CountTokensBody, MessagesBody

ASKED = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [ASKED]}
WITHOUT_EFFECT: dict[str, Any] = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "container": {"skills": []},
    "context_management": {"edits": []},
    "mcp_servers": [],
    "inference_geo": "eu",
    "cache_control": {"type": "ephemeral"},
}


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_fields_without_effect_are_accepted(field: str) -> None:
    assert MessagesBody.model_validate({**BODY, field: WITHOUT_EFFECT[field]}) == MessagesBody.model_validate(BODY)


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "display": "omitted"}])
def test_the_model_reasons_on_request_only(thinking: Any) -> None:
    assert MessagesBody.model_validate({**BODY, "thinking": thinking}).thinks
    assert not MessagesBody.model_validate({**BODY, "thinking": {"type": "disabled"}}).thinks
    assert not MessagesBody.model_validate(BODY).thinks


def within(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (within("user", {"type": "picture"}), "not 'picture'"),
        (within("user", {**RESULT, "content": [{"type": "picture"}]}), "not 'picture'"),
        (within("user", {"type": ["image"]}), "not ''"),
        (within("user", CALL), "role 'user' cannot have content of the type 'tool_use'"),
        (within("assistant", RESULT), "role 'assistant' cannot have content of the type 'tool_result'"),
        ({"system": [IMAGE]}, "a system prompt can have content of the type 'text' only"),
        (within("assistant", IMAGE), "role 'assistant' cannot have content of the type 'image'"),
        ({"system": [{**RESULT, "text": "x"}]}, "a system prompt can have content of the type 'text' only"),
        ({"messages": []}, "at least 1 item"),
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers' is not supported"),
        ({"tool_choice": {"type": "tool"}}, "needs a 'name'"),
        ({"tools": [{"name": "has space", "input_schema": {}}]}, "pattern"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"temperature": "1"}, "valid number"),
    ],
)
def test_what_cannot_be_done_is_rejected_by_name(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected) as raised:
        MessagesBody.model_validate({**BODY, **fields})
    assert raised.value.error_count() == 1


def test_counting_needs_no_length() -> None:
    CountTokensBody.model_validate({"model": "m", "messages": [ASKED]})
    with pytest.raises(ValidationError, match="max_tokens"):
        MessagesBody.model_validate({"model": "m", "messages": [ASKED]})
