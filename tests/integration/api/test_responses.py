"""/v1/responses through the official client: objects, event order, conversations, and the store."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.requests import RESPONSES_TOOLS
from tests.servers import Served

QUESTION = "Write a function that reads a file."


def test_a_response(served: Served) -> None:
    answer = served.client.responses.create(model=served.model, input=QUESTION, max_output_tokens=40, instructions="Be short.")
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text
    assert answer.instructions == "Be short."
    assert answer.usage and answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert served.client.responses.retrieve(answer.id) == answer
    served.client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        served.client.responses.retrieve(answer.id)


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


def test_custom_calls(served: Served) -> None:
    tool: Any = {
        "type": "custom",
        "name": "run",
        "format": {"type": "grammar", "syntax": "regex", "definition": "(ls|cd) [a-z]{1,8}"},
    }
    fields: Any = {"model": served.model, "input": "Where?", "tools": [tool, {"type": "web_search"}]}
    fields["tool_choice"] = {"type": "custom", "name": "run"}
    for seed in range(3):
        raw = served.client.responses.with_raw_response.create(**fields, extra_body={"seed": seed})
        assert raw.headers["x-outrider-ignored"] == "tools.web_search"
        [call] = raw.parse().output
        assert call.type == "custom_tool_call" and re.fullmatch("(ls|cd) [a-z]{1,8}", call.input)
        events: list[Any] = list(served.client.responses.create(**fields, extra_body={"seed": seed}, stream=True))
        [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        grown = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert done.input == "".join(grown) == call.input
        with served.client.responses.stream(**fields, extra_body={"seed": seed}) as stream:
            [streamed] = stream.get_final_response().output
        assert streamed.type == "custom_tool_call" and streamed.input == call.input
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a.py"}
    history: Any = [{"role": "user", "content": "Where?"}, call.model_dump(exclude_none=True), result]
    last = served.client.responses.create(
        model=served.model, input=history, tools=[tool], tool_choice="none", max_output_tokens=16
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


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


def test_the_official_client_parses(served: Served) -> None:
    answer = served.client.responses.parse(model=served.model, input="Who?", text_format=Person, temperature=0)
    assert isinstance(answer.output_parsed, Person)


def test_logprobs(served: Served) -> None:
    answer = served.client.responses.create(
        model=served.model, input=QUESTION, max_output_tokens=16, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    [item] = answer.output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text" and part.logprobs
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"background": True}, 400, "background"),
    ({"conversation": "c"}, 400, "conversation"),
    ({"tools": [{"type": 5}]}, 400, "tools.0"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 404, "input"),
    ({"input": [{"role": "user", "content": [{"type": "picture"}]}]}, 400, "not 'picture'"),
    ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
    ({"tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice"),
    ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
    ({"speculation": {"drafter": "magic"}}, 400, "speculation.drafter"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
]


@pytest.mark.parametrize(("fields", "status", "words"), BAD)
def test_errors(served: Served, fields: dict[str, Any], status: int, words: str) -> None:
    response: httpx.Response = served.http.post("/v1/responses", json={"model": served.model, "input": "x"} | fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert words in f"{error['param']} {error['message']}"


def test_only_background_responses_are_cancelled(served: Served) -> None:
    answer = served.client.responses.create(model=served.model, input="x", max_output_tokens=16)
    with pytest.raises(openai.BadRequestError, match="background"):
        served.client.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.cancel("resp_x")
