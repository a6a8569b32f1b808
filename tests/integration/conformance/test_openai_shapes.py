"""Answers match OpenAI's API description: the complete file if it is present, and the excerpt in `openai_shapes`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import yaml

from tests.conftest import SHARED
from tests.integration.conformance.openai_shapes import SHAPES
from tests.requests import MESSAGES, PROMPT, RESPONSES_TOOLS, TOOLS, events
from tests.servers import Served

DESCRIPTION = SHARED / "openai-openapi.yaml"
Check = Callable[[str, Any], None]


def with_nulls(schema: Any) -> Any:
    """Rewrites OpenAPI 3.0's `nullable` as JSON Schema."""
    if isinstance(schema, list):
        return [with_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: with_nulls(each) for name, each in schema.items() if name != "nullable"}
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") is True else made


@pytest.fixture(scope="module", params=["ours", "theirs"])
def check(request: pytest.FixtureRequest) -> Check:
    """Raises if a body does not match the named schema."""
    if request.param == "ours":
        return lambda name, body: jsonschema.validate(body, SHAPES[name])
    if not DESCRIPTION.exists():
        pytest.skip("OpenAI's description is not on this machine")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    components = with_nulls(yaml.load(DESCRIPTION.read_text(), loader)["components"])
    validators: dict[str, Any] = {}

    def validate(name: str, body: Any) -> None:
        if name not in validators:
            root = {"$ref": f"#/components/schemas/{name}", "components": components}
            validators[name] = jsonschema.Draft202012Validator(root)
        error = jsonschema.exceptions.best_match(validators[name].iter_errors(body))
        assert error is None, f"{error.json_path}: {error.message[:300]}"

    return validate


CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"tools": TOOLS, "tool_choice": "required"},
    {"response_format": {"type": "json_object"}, "seed": 1},
]


@pytest.mark.parametrize("fields", CHATS, ids=["plain", "logprobs", "tools", "json"])
def test_chat(served: Served, check: Check, fields: dict[str, Any]) -> None:
    body = {"model": served.model, "messages": MESSAGES, "max_tokens": 60, "temperature": 1, **fields}
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    check("CreateChatCompletionResponse", response.json())
    stream = events(served, "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    for chunk in stream[:-1]:
        check("CreateChatCompletionStreamResponse", chunk)


def test_completions(served: Served, check: Check) -> None:
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": 20, "logprobs": 2}
    check("CreateCompletionResponse", served.http.post("/v1/completions", json=body).json())


def test_models_and_errors(served: Served, check: Check) -> None:
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
def test_responses(served: Served, check: Check, fields: dict[str, Any]) -> None:
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
