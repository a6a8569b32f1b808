"""Bodies of any content: the first error ends validation, lengths are bounded, and errors have the size of a sentence."""

import json
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from outrider.server.anthropic.schema import CountTokensBody, MessagesBody
from outrider.server.http import json_body
from outrider.server.llama.schema import InfillBody
from outrider.server.openai.models import DetokenizeBody, TokenizeBody
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.schema import ChatBody, CompletionBody
from outrider.server.settings import Limits

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
BODY_BYTES = Limits().body_bytes
JUNK: tuple[Any, ...] = ({}, None, 0, "", [])
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


CONTAINERS = [each for path, body in BODIES.items() for each in containers(body, path)]


@pytest.mark.parametrize(("name", "kind", "fill"), CONTAINERS, ids=[name for name, _, _ in CONTAINERS])
def test_a_list_of_junk_is_rejected_at_its_first_error(name: str, kind: type, fill: Fill) -> None:
    body = BODIES[name.split(".")[0].split("[")[0]]
    for junk in JUNK:
        scalars = kind is list and not isinstance(junk, list | dict)
        count = BODY_BYTES // (len(json.dumps(junk)) + 1) if scalars else json_body.MAX_NODES
        content: Any = [junk] * count if kind is list else {str(key): junk for key in range(count)}
        with pytest.raises(ValidationError) as raised:
            body.model_validate(fill(content))
        assert raised.value.error_count() <= 4, junk
