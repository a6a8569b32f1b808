"""Attacks on the endpoints, and bodies of any content: the answer is a client's error of a sentence, or an answer."""

import json
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from outrider import models
from outrider.server.anthropic.schema import CountTokensBody, MessagesBody
from outrider.server.http import json_body
from outrider.server.llama.schema import InfillBody
from outrider.server.openai.models import DetokenizeBody, TokenizeBody
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.schema import ChatBody, CompletionBody
from outrider.server.settings import Limits
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "x"})])
@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        *((nested(600), 400), (nested(100), 200)),
        *((f'{{"maximum": {x}}}', status) for x, status in (("NaN", 400), ("-Infinity", 400), ("1e999", 400), (BIG, 200))),
    ],
    ids=["too deep", "deep", "NaN", "Infinity", "overflow", "large"],
)
def test_tool_parameters_that_cannot_be_written(
    path: str, body: dict[str, Any], parameters: str, status: int, stream: bool
) -> None:
    function = f'{{"name": "f", "parameters": {parameters}}}'
    tools = f'"tools": [{{"type": "function", "name": "f", "function": {function}, "parameters": {parameters}}}]'
    response = send(path, tools, **body, stream=stream)
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


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/infill": InfillBody,
}
JUNK: tuple[Any, ...] = ({}, None, "")
LARGE_JUNK: tuple[Any, ...] = ([{}] * 1000, {str(key): {} for key in range(1000)}, "x" * 5000, 10**30, 1e308)
Fill = Callable[[Any], Any]


def members(annotation: Any) -> tuple[Any, ...]:
    """The branches of an annotation, without metadata."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(each for member in get_args(annotation) for each in members(member))
    return (annotation,)


def sample(annotation: Any) -> Any:
    """A small valid value."""
    annotation = members(annotation)[0]
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    if get_origin(annotation) is list:
        return [sample(get_args(annotation)[0])]
    if get_origin(annotation) is dict:
        return {}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: sample(field.annotation) for name, field in annotation.model_fields.items() if field.is_required()}
    return {str: "x", int: 1}[annotation]


def containers(annotation: Any, name: str) -> Iterator[tuple[str, type, Fill]]:
    """Every list and dict below an annotation: its name, its type, and the value around a given content."""
    for member in members(annotation):
        if get_origin(member) in (list, dict):
            yield name, get_origin(member), lambda content: content
        if get_origin(member) is list:
            for inner, kind, fill in containers(get_args(member)[0], f"{name}[]"):
                yield inner, kind, partial(lambda fill, content: [fill(content)], fill)
        if isinstance(member, type) and issubclass(member, BaseModel):
            for field_name, field in member.model_fields.items():
                key = field.alias or field_name
                for inner, kind, fill in containers(field.annotation, f"{name}.{key}"):
                    yield inner, kind, partial(within, member, key, fill)


def within(model: type[BaseModel], key: str, fill: Fill, content: Any) -> dict[str, Any]:
    """A value of `model` whose field `key` has a given content."""
    return {**sample(model), key: fill(content)}


KEYS = [*map(str, range(json_body.MAX_NODES))]
CONTAINERS = [each for path, body in BODIES.items() for each in containers(body, path)]


@pytest.mark.parametrize(("name", "kind", "fill"), CONTAINERS, ids=[name for name, _, _ in CONTAINERS])
def test_a_list_of_junk_is_rejected_at_its_first_error(name: str, kind: type, fill: Fill) -> None:
    body = BODIES[name.split(".")[0].split("[")[0]]
    for junk in JUNK:
        scalars = kind is list and not isinstance(junk, list | dict)
        count = Limits().body_bytes // (len(json.dumps(junk)) + 1) if scalars else json_body.MAX_NODES
        content: Any = [junk] * count if kind is list else dict.fromkeys(KEYS, junk)
        with pytest.raises(ValidationError) as raised:
            body.model_validate(fill(content))
        assert raised.value.error_count() <= 4, junk


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_junk_is_a_client_error(path: str) -> None:
    app = app_with(FakeEngine("x"))
    for name, field in BODIES[path].model_fields.items():
        for content in LARGE_JUNK:
            response = fetch(app, "POST", path, sample(BODIES[path]) | {field.alias or name: content})
            assert response.status_code in (200, 400, 404), (name, response.text)
            assert response.status_code == 200 or len(response.content) < 1000, name
