"""Answers have the parts of OpenAI's API description that clients rely on."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.requests import MESSAGES, PROMPT, RESPONSES_TOOLS, TOOLS, events
from tests.servers import Served


def record(**properties: Any) -> dict[str, Any]:
    """An object with these required properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number"}


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


FINISH = {"enum": ["stop", "length", "tool_calls", "content_filter", "function_call"]}
ENTRY = record(token=TEXT, logprob=NUMBER, bytes=nullable(listed(COUNT)))
CHAT_LOGPROBS = nullable(record(content=nullable(listed({**ENTRY, "properties": {**ENTRY["properties"]}})), refusal={}))
CALL = record(id=TEXT, type={"const": "function"}, function=record(name=TEXT, arguments=TEXT))
USAGE = record(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
MESSAGE = record(role={"const": "assistant"}, content=nullable(TEXT), refusal=nullable(TEXT))
MESSAGE["properties"]["tool_calls"] = listed(CALL)
DELTA = {
    "type": "object",
    "properties": {"role": TEXT, "content": nullable(TEXT), "tool_calls": listed({"type": "object", "required": ["index"]})},
}
COMMON = {"id": TEXT, "created": COUNT, "model": TEXT}
RESPONSE = record(
    id=TEXT,
    object={"const": "response"},
    created_at=NUMBER,
    error={},
    incomplete_details={},
    instructions={},
    model=TEXT,
    tools={"type": "array"},
    output=listed(record(id=TEXT, type={"enum": ["message", "function_call", "reasoning"]})),
    parallel_tool_calls={"type": "boolean"},
    metadata={},
    tool_choice={},
    temperature=nullable(NUMBER),
    top_p=nullable(NUMBER),
    status={"enum": ["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]},
)

SHAPES: dict[str, dict[str, Any]] = {
    "CreateChatCompletionResponse": record(
        **COMMON,
        object={"const": "chat.completion"},
        choices=listed(record(index=COUNT, message=MESSAGE, logprobs=CHAT_LOGPROBS, finish_reason=FINISH)),
        usage=USAGE,
    ),
    "CreateChatCompletionStreamResponse": record(
        **COMMON,
        object={"const": "chat.completion.chunk"},
        choices=listed(record(index=COUNT, delta=DELTA, logprobs=CHAT_LOGPROBS, finish_reason=nullable(FINISH))),
    ),
    "CreateCompletionResponse": record(
        **COMMON,
        object={"const": "text_completion"},
        choices=listed(record(index=COUNT, text=TEXT, logprobs={}, finish_reason=nullable(FINISH))),
    ),
    "ErrorResponse": record(error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT))),
    "ListModelsResponse": record(
        object={"const": "list"}, data=listed(record(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT))
    ),
    "Response": RESPONSE,
    "ResponseStreamEvent": record(type=TEXT, sequence_number=COUNT),
}


def check(name: str, body: Any) -> None:
    """Raises if a body does not match the named schema."""
    jsonschema.validate(body, SHAPES[name])


CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"tools": TOOLS, "tool_choice": "required"},
    {"response_format": {"type": "json_object"}, "seed": 1},
]


@pytest.mark.parametrize("fields", CHATS, ids=["plain", "logprobs", "tools", "json"])
def test_chat(served: Served, fields: dict[str, Any]) -> None:
    body = {"model": served.model, "messages": MESSAGES, "max_tokens": 60, "temperature": 1, **fields}
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    check("CreateChatCompletionResponse", response.json())
    stream = events(served, "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    for chunk in stream[:-1]:
        check("CreateChatCompletionStreamResponse", chunk)


def test_completions(served: Served) -> None:
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": 20, "logprobs": 2}
    check("CreateCompletionResponse", served.http.post("/v1/completions", json=body).json())


def test_models_and_errors(served: Served) -> None:
    check("ListModelsResponse", served.http.get("/v1/models").json())
    for method, path in (
        ("GET", "/nothing"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/responses/x"),
    ):
        answer = served.http.request(method, path)
        assert answer.status_code >= 400
        check("ErrorResponse", answer.json())


@pytest.mark.parametrize("fields", [{}, {"tools": RESPONSES_TOOLS, "tool_choice": "required"}], ids=["plain", "tools"])
def test_responses(served: Served, fields: dict[str, Any]) -> None:
    body = {"model": served.model, "input": "Hello.", "max_output_tokens": 60, **fields}
    check("Response", served.http.post("/v1/responses", json=body).json())
    with served.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as reply:
        lines = reply.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert len(data) == len(names) > 5

    for name, text in zip(names, data, strict=True):
        event = json.loads(text)
        assert event["type"] == name
        check("ResponseStreamEvent", event)
