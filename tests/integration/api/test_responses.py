"""/v1/responses through the official client: objects, event order, conversations, and the store."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.requests import RESPONSES_TOOLS
from tests.servers import Served

QUESTION = "Write a function that reads a file."


def test_the_events_of_a_stream(served: Served) -> None:
    fields: Any = {"model": served.model, "input": QUESTION, "max_output_tokens": 40, "temperature": 0}
    full = served.client.responses.create(**fields)
    events: list[Any] = list(served.client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{full.status}",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == full.output_text
    assert events[-1].response.output_text == full.output_text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    with served.client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == full.output_text


def test_function_calls(served: Served) -> None:
    fields: Any = {"model": served.model, "input": "Weather?", "tools": RESPONSES_TOOLS, "tool_choice": "required"}
    for seed in range(3):
        extra: Any = {"extra_body": {"seed": seed}}
        answer = served.client.responses.create(**fields, **extra)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert calls and len(calls) == len(answer.output)
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
        events: list[Any] = list(served.client.responses.create(**fields, **extra, stream=True))
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [(event.name, event.arguments) for event in done] == [(call.name, call.arguments) for call in calls]
        for number, event in enumerate(done):
            grown = [e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == number]
            assert "".join(grown) == event.arguments
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    last = served.client.responses.create(
        model=served.model, input=results, previous_response_id=answer.id, max_output_tokens=16
    )
    assert last.output_text is not None


def test_a_response_continues_a_conversation(served: Served) -> None:
    first = served.client.responses.create(model=served.model, input=QUESTION * 8, max_output_tokens=30)
    second = served.client.responses.create(
        model=served.model, input="And now one that writes.", previous_response_id=first.id, max_output_tokens=16
    )
    assert first.usage and second.usage
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0.8 * first.usage.input_tokens  # read from the session
    assert second.previous_response_id == first.id
    not_stored = served.client.responses.create(model=served.model, input="x", store=False, max_output_tokens=16)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.create(model=served.model, input="y", previous_response_id=not_stored.id)
