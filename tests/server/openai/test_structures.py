"""Structured output in the fields of OpenAI, vLLM and llama-server."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from outrider.server.chat.grammar_job import Structure
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.openai.schema import CompletionBody
from tests.server.fakes import VOCABULARY, FakeEngine, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LARK = 'start: "a"+\n'


def structures(**fields: Any) -> dict[str, Structure]:
    return CompletionBody.model_validate({"model": "m", "prompt": "x", **fields}).structures


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    with closing(GrammarChecker()) as checker:
        yield checker


@pytest.mark.parametrize(
    ("fields", "name", "structure"),
    [
        ({"guided_json": SCHEMA}, "guided_json", ("json_schema", SCHEMA)),
        ({"guided_json": '{"type": "object"}'}, "guided_json", ("json_schema", {"type": "object"})),
        ({"guided_regex": "a+"}, "guided_regex", ("regex", "a+")),
        ({"guided_choice": ["a"]}, "guided_choice", ("choice", ["a"])),
        ({"guided_grammar": LARK}, "guided_grammar", ("grammar", LARK)),
        ({"json_schema": SCHEMA}, "json_schema", ("lenient_json_schema", SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", ("json_schema", SCHEMA)),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", ("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", ("choice", ["a"])),
        ({"structured_outputs": {"grammar": LARK}}, "structured_outputs.grammar", ("grammar", LARK)),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", ("json_object", True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", ("lenient_json_schema", SCHEMA)),
    ],
)
def test_every_field_becomes_a_structure(
    checker: GrammarChecker, fields: dict[str, Any], name: str, structure: tuple[str, Any]
) -> None:
    assert structures(**fields) == {name: Structure(*structure)}
    assert asyncio.run(checker.grammar(structures(**fields))).grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"grammar": "root ::= missing"}, "grammar"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    response = post(FakeEngine("a"), "/v1/completions", {"prompt": "x", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_tokens_of_gbnf_are_the_models() -> None:
    token = min(VOCABULARY.grammar_tokens)
    engine = FakeEngine("a")
    assert post(engine, "/v1/completions", {"prompt": "x", "grammar": f"root ::= {token}"}).status_code == 200
    assert f"<[{VOCABULARY.grammar_tokens[token]}]>" in (engine.requests[0].grammar or "")
    response = post(engine, "/v1/completions", {"prompt": "x", "grammar": "root ::= <|no such token|>"})
    assert response.status_code == 400 and "no special token of the model" in response.json()["error"]["message"]
