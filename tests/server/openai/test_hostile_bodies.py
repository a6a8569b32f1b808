"""Attacks on the endpoints: each is answered with a client's error, or with an answer."""

import json
from typing import Any

import httpx
import pytest

from outrider import models
from tests.server.fakes import FakeEngine, app_with, fetch

APP = app_with(FakeEngine("x"))
CHAT = {"messages": [{"role": "user", "content": "x"}]}
BIG = "1" * 30


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def send(path: str, fields: str, **body: Any) -> httpx.Response:
    """Sends a body with fields that are given as JSON text."""
    content = json.dumps({"model": models.NAME, **body})[:-1] + f", {fields}}}"
    return fetch(APP, "POST", path, content=content.encode(), headers={"content-type": "application/json"})


def tools(parameters: str) -> str:
    return f'"tools": [{{"type": "function", "name": "f", "function": {{"name": "f", "parameters": {parameters}}}, ' + (
        f'"parameters": {parameters}}}]'
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "x"})])
@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        (nested(600), 400),
        (nested(100), 200),
        ('{"maximum": NaN}', 400),
        ('{"maximum": -Infinity}', 400),
        ('{"maximum": 1e999}', 400),
        (f'{{"maximum": {BIG}}}', 200),
    ],
    ids=["too deep", "deep", "NaN", "Infinity", "overflow", "large"],
)
def test_tool_parameters_that_cannot_be_written(
    path: str, body: dict[str, Any], parameters: str, status: int, stream: bool
) -> None:
    response = send(path, tools(parameters), **body, stream=stream)
    assert response.status_code == status, response.text
    assert len(response.content) < 20_000


@pytest.mark.parametrize(
    "arguments", ["[" * 900 + "]" * 900, nested(100_000), '{"a": NaN}', f"[{BIG}]", "[" * 50_000, '"\\ud800"'], ids=len
)
def test_arguments_that_cannot_be_decoded_stay_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    shown = "{{ m.tool_calls[0].function.name ~ (m.tool_calls[0].function.arguments | tojson)[:60] if m.tool_calls }}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{shown}{{% endfor %}}"
    app = app_with(FakeEngine("x"), template=template)
    assert fetch(app, "POST", "/v1/chat/completions", {"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (f'"logit_bias": {{"{"1" * 5000}": 1}}', "logit_bias"),
        (f'"logit_bias": {{"1": {BIG}}}', "logit_bias"),
        (f'"stop_token_ids": [{BIG}]', "stop_token_ids"),
        (f'"seed": {BIG}', "seed"),
        (f'"n": {"9" * 4000}', "n"),
        ('"model": "' + "x" * 1_000_000 + '"', "model"),
        ('"metadata": {"' + "x" * 1_000_000 + '": 1}', "metadata"),
        ('"tool_choice": "' + "x" * 1_000_000 + '"', "tool_choice"),
        ('"messages": [{"role": "' + "x" * 1_000_000 + '"}]', "messages.0.role"),
        ('"messages": [{"role": "user", "content": [{"type": "' + "x" * 1_000_000 + '"}]}]', "messages.0.content"),
    ],
    ids=lambda value: value[:30],
)
def test_errors_name_the_field_and_have_the_size_of_a_sentence(fields: str, param: str) -> None:
    response = send("/v1/chat/completions", fields, **CHAT)
    assert response.status_code in (400, 404) and len(response.content) < 1000
    assert response.json()["error"]["param"] == param
