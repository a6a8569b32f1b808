"""JSON schemas of the parts of OpenAI's answers that clients rely on. They do not need OpenAI's description file."""

from __future__ import annotations

from typing import Any


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
