"""Messages bodies: what is accepted without effect, and what is rejected by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.anthropic.schema import MessagesBody

ASKED = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [ASKED]}


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
        (within("user", CALL), "role 'user' cannot have content of the type 'tool_use'"),
        (within("assistant", RESULT), "role 'assistant' cannot have content of the type 'tool_result'"),
        ({"system": [IMAGE]}, "a system prompt can have content of the type 'text' only"),
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers' is not supported"),
        ({"tool_choice": {"type": "tool"}}, "needs a 'name'"),
        ({"tools": [{"name": "has space", "input_schema": {}}]}, "pattern"),
    ],
)
def test_what_cannot_be_done_is_rejected_by_name(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected) as raised:
        MessagesBody.model_validate({**BODY, **fields})
    assert raised.value.error_count() == 1
