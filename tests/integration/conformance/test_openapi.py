"""Generated requests, valid and invalid by the API's description: no 500, no hang, no undocumented status; answers are typed.

`OUTRIDER_API_EXAMPLES=200` generates more examples per operation.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from tests.requests import MESSAGES, PROMPT, RESPONSES_TOOLS, TOOLS, events
from tests.servers import Served, serving

EXAMPLES = int(os.environ.get("OUTRIDER_API_EXAMPLES", "8"))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose context is so small that every answer is short."""
    with serving("--model.dtype", "float32", "--model.context_tokens", "64") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_any_request(server: Served, mode: GenerationMode) -> None:
    """Valid (positive) and invalid (negative) requests; half of the bodies name the served model."""
    described: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) >= 14
    for operation in operations:

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and len(case.body["model"]) % 2 == 0:
                case.body["model"] = server.model
            case.call_and_validate(checks=[not_a_server_error, status_code_conformance], timeout=60)

        if mode is GenerationMode.POSITIVE or operation.body:  # a path alone cannot be invalid
            send()
    assert server.process.poll() is None


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
    for request in ("GET /nothing", "DELETE /v1/models", "POST /v1/chat/completions", "GET /v1/responses/x"):
        answer = served.http.request(*request.split())
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
