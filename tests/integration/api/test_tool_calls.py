"""Tool calls: enforced calls always parse, and a conversation of calls and results continues."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.requests import TOOL_SCHEMAS, TOOLS
from tests.servers import Served

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), TOOL_SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_parse_streamed_or_not(served: Served, seed: int) -> None:
    common: Any = {"model": served.model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": seed}
    answer = served.client.chat.completions.create(**common).choices[0]
    check(answer.message.tool_calls)
    assert answer.message.content is None
    assert answer.finish_reason == "tool_calls"
    with served.client.chat.completions.stream(**common) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    check(streamed.message.tool_calls)
    assert streamed.finish_reason == "tool_calls"
    plain = served.client.chat.completions.create(**common, extra_body={"speculation": {"drafter": "none"}}).choices[0]
    one = [(c.function.name, c.function.arguments) for c in answer.message.tool_calls or []]
    assert one == [(c.function.name, c.function.arguments) for c in plain.message.tool_calls or []]
    assert one == [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls or []]
