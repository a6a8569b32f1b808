"""Answers have the types of OpenAI's client, and the fields that its API's description requires though they may be null."""

import json
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.requests import MESSAGES, PROMPT, RESPONSES_TOOLS, TOOLS, events
from tests.servers import Served

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
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
    ChatCompletion.model_validate(response.json(), strict=True)
    assert response.json()["usage"].keys() >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    for choice in response.json()["choices"]:
        assert "logprobs" in choice and choice["message"].keys() >= {"role", "content", "refusal"}
        for entry in (choice["logprobs"] or {}).get("content") or ():
            assert entry.keys() >= {"token", "logprob", "bytes"}
    stream = events(served, "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    for chunk in stream[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert all(choice.keys() >= {"delta", "logprobs", "finish_reason"} for choice in chunk["choices"])


def test_completions(served: Served) -> None:
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": 20, "logprobs": 2}
    answer = served.http.post("/v1/completions", json=body).json()
    Completion.model_validate(answer, strict=True)
    assert "logprobs" in answer["choices"][0]


def test_models_and_errors(served: Served) -> None:
    found = served.http.get("/v1/models").json()
    assert found["object"] == "list" and [Model.model_validate(each, strict=True) for each in found["data"]]
    for method, path in (
        ("GET", "/nothing"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/responses/x"),
    ):
        answer = served.http.request(method, path)
        assert answer.status_code >= 400
        error = answer.json()["error"]
        assert error.keys() >= {"message", "type", "param", "code"} and error["message"] and error["type"]


@pytest.mark.parametrize("fields", [{}, {"tools": RESPONSES_TOOLS, "tool_choice": "required"}], ids=["plain", "tools"])
def test_responses(served: Served, fields: dict[str, Any]) -> None:
    body = {"model": served.model, "input": "Hello.", "max_output_tokens": 60, **fields}
    answer = served.http.post("/v1/responses", json=body).json()
    Response.model_validate(answer)
    assert answer.keys() >= {"error", "incomplete_details", "instructions", "metadata", "temperature", "top_p", "status"}
    with served.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as reply:
        lines = reply.read().decode().splitlines()
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert [event["type"] for event in data] == names and len(names) > 5
    for event in data:
        STREAM_EVENT.validate_python(event)
