"""/v1/messages through the official client: messages, streams, tools, counts and errors."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import Served

anthropic: Any = pytest.importorskip("anthropic")

QUESTION: list[Any] = [{"role": "user", "content": "Write a function that reads a file."}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,12}$"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


def test_a_screenshot_in_a_result_does_not_end_a_session(served: Served, client: Any) -> None:
    """Claude Code sends it again with every later turn."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 5000}}
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sunny."}, image]}
    turns = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    fields: Any = {"model": served.model, "max_tokens": 8, "tools": [TOOL], "extra_body": {"temperature": 0}}
    raw = client.messages.with_raw_response.create(messages=turns, **fields)
    assert raw.headers["x-outrider-ignored"] == "messages.image"
    first = raw.parse()
    read = first.usage.input_tokens + first.usage.cache_read_input_tokens
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Thank you."}]
    second = client.messages.create(messages=turns, **fields)
    assert second.usage.cache_read_input_tokens >= read - 8
    counted = client.messages.count_tokens(model=served.model, messages=turns, tools=[TOOL])
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens < 1000
