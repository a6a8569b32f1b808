"""Structured output: always valid, and equal with and without drafts."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from outrider import models
from outrider.drafters.none import NoDrafter
from outrider.server.chat.tools import FORMATS, calls_grammar, tool_parser
from outrider.verify.constraints.grammar import GrammarCompiler
from outrider.verify.decode import decode
from outrider.verify.model.backend import load_model
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.tokenizer import load_tokenizer, stop_ids
from outrider.verify.verifier import Verifier
from tests.grammars import json_grammar, nested_grammars, reference_chain, rule_chain, terminal_chain
from tests.requests import MESSAGES, complete, text
from tests.servers import Served

WORD = {"type": "string", "maxLength": 12}
SMALL = {"type": "integer", "minimum": -99, "maximum": 99}


def record(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required or properties), "additionalProperties": False}


NUMBER = record(number={"type": "number", "minimum": 0, "maximum": 1})
SCHEMAS: list[dict[str, Any]] = [
    record(name=WORD),
    record(name=WORD, age=SMALL),
    record(ok={"type": "boolean"}, note={"type": ["string", "null"], "maxLength": 8}),
    record(kind={"enum": ["cat", "dog", 3, None]}),
    record(kind={"const": "fixed"}, size=SMALL),
    record(tags={"type": "array", "items": WORD, "maxItems": 3}),
    record(point={"type": "array", "prefixItems": [SMALL, SMALL], "items": False, "minItems": 2}),
    record(inner=record(a=SMALL, b=record(c={"type": "boolean"}))),
    record("a", a=SMALL, b=SMALL),
    record(value={"anyOf": [SMALL, WORD]}),
    record(value={"anyOf": [record(x=SMALL), record(y=WORD)]}),
    record(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
    record(date={"type": "string", "format": "date"}),
    record(id={"type": "string", "format": "uuid"}),
    NUMBER,
    record(matrix={"type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": SMALL}}),
    {**record(tree={"$ref": "#/$defs/node"}), "$defs": {"node": record(left=SMALL, right={"enum": ["leaf"]})}},
    {"type": "array", "items": record(x=SMALL), "minItems": 1, "maxItems": 2},
    {"enum": ["red", "green", "blue"]},
    record(text={"type": "string", "minLength": 3, "maxLength": 5}, flag={"type": "null"}),
]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(schema, marks=[pytest.mark.slow] if number % 3 else [], id=str(number))
        for number, schema in enumerate(SCHEMAS)
    ],
)
def test_a_hundred_answers_are_valid_and_independent_of_drafts(served: Served, schema: dict[str, Any]) -> None:
    for seed in range(5):
        answers = []
        for drafter in ("none", "trigram", "fusion"):
            fields = {"temperature": 1, "seed": seed, "max_tokens": 400, "response_format": schema_format(schema)}
            found = complete(served, **fields, speculation={"drafter": drafter})["choices"][0]
            answers.append((found["text"], found["finish_reason"]))
        assert answers[1] == answers[2] == answers[0]
        text, reason = answers[0]
        if schema is NUMBER and reason == "length":  # its digits need not end
            assert re.fullmatch(r'\{\s*"number"\s*:\s*[01]\.\d+', text)
        else:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_forced_tokens_are_drafted(served: Served) -> None:
    schema = record(a_rather_long_property_name={"const": "and a value that can only be this one"})
    found = complete(served, response_format=schema_format(schema), speculation={"report": True}, max_tokens=100)
    assert json.loads(text(found)) == {"a_rather_long_property_name": "and a value that can only be this one"}
    assert found["speculation"]["accepted_tokens"]["grammar"] > 10
    assert found["speculation"]["mean_tokens_per_step"] > 5


def test_other_structures(served: Served) -> None:
    assert text(complete(served, choice=["yes", 'no "never"'], temperature=1, seed=2)) in ("yes", 'no "never"')
    assert re.fullmatch(r"\d{3}-[a-z]{2}", text(complete(served, regex=r"\d{3}-[a-z]{2}", temperature=1, seed=2)))
    assert text(complete(served, grammar='start: "a" ("," "a")~3', temperature=1, seed=2)) == "a,a,a,a"
    found = complete(served, response_format={"type": "json_object"}, temperature=0, max_tokens=200)["choices"][0]
    assert found["text"].startswith("{")
    if found["finish_reason"] == "stop":
        assert isinstance(json.loads(found["text"]), dict)


FUNCTIONS = {"weather": record("city", city=WORD, days=SMALL), "clock": record(zone={"enum": ["utc", "cet"]})}


class Enforced:
    """The embedded model, decoding under grammars."""

    def __init__(self) -> None:
        self._runner = load_model(LoadOptions(str(models.TARGET), dtype="float32"))
        self._tokenizer = load_tokenizer(str(models.TARGET))
        self._stops = stop_ids(self._runner.stop_tokens, self._tokenizer)
        self._compiler = GrammarCompiler(self._tokenizer, self._runner.vocabulary, self._stops)

    def answer(self, grammar: str, seed: int, max_tokens: int = 300) -> str:
        """A complete answer that follows the grammar."""
        prompt = np.array(self._tokenizer.encode("def call():\n"), np.int32)
        options = DecodeOptions(SamplingParams(seed=seed), max_tokens, self._stops)
        verifier = Verifier(self._runner, self._runner.new_cache())
        decoded = decode(verifier, NoDrafter(), prompt, options, self._compiler.compile(grammar))
        assert decoded.finish == "stop"
        return str(self._tokenizer.decode(decoded.tokens[:-1]))


@pytest.fixture(scope="module")
def enforced() -> Enforced:
    return Enforced()


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_enforced_calls_parse_in_every_format(enforced: Enforced, format: str) -> None:
    grammar = LLMatcher.grammar_from_lark(calls_grammar(format, FUNCTIONS, 3, {}))
    for seed in range(3):
        reader = tool_parser(format, FUNCTIONS)
        parts = [*reader.feed(enforced.answer(grammar, seed)), *reader.finish()]
        assert {part.kind for part in parts} == {"call", "arguments"}
        for number, name in [(part.call, part.text) for part in parts if part.kind == "call"]:
            arguments = "".join(part.text for part in parts if part.kind == "arguments" and part.call == number)
            jsonschema.validate(json.loads(arguments), FUNCTIONS[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 10**30},
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": WORD}} for i in range(8)]} for j in range(8)]},
        {"type": "string", "pattern": "^(.*a.{100}b){10}$"},
        {"type": "array", "minItems": 10**6, "items": {"type": "array", "maxItems": 10**6, "items": WORD}},
        record(**{f"p{i}": {"type": "string", "maxLength": 10**6} for i in range(1000)}),
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_hostile_schemas_are_answered_or_refused(served: Served, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    content = {"model": served.model, "messages": MESSAGES, "max_tokens": 4, "response_format": form}
    response = served.http.post("/v1/chat/completions", json=content)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert "\n" not in response.json()["error"]["message"]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "x", "max_tokens": 4, **fields}


DEEP = reference_chain(900)
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": DEEP}, "$defs": DEEP["$defs"]}}
BOMBS = [
    completion(grammar=rule_chain(2900)),
    completion(grammar=terminal_chain(2400)),
    completion(grammar=nested_grammars(2900)),
    completion(grammar=json_grammar(DEEP)),
    completion(grammar="start: " + "(" * 30_000 + '"x"' + ")" * 30_000),
    completion(regex="(" * 30_000 + "a" + ")" * 30_000),
    completion(choice=[f"w{number}" for number in range(6000)]),
    completion(response_format=schema_format(DEEP)),
    chat(response_format=schema_format(reference_chain(900, "anyOf"))),
    chat(tools=[{"type": "function", "function": {**TOOL, "strict": True}}], tool_choice="required"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP, "strict": True}}}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", **TOOL, "strict": True}], "tool_choice": "required"}),
]


@pytest.mark.parametrize(("path", "fields"), BOMBS, ids=range(len(BOMBS)))
def test_a_chain_of_rules_does_not_end_the_server(served: Served, path: str, fields: dict[str, Any]) -> None:
    """Neither the front end nor the worker: both answer the next request."""
    response = served.http.post(path, json={"model": served.model, **fields})
    assert response.status_code == 400, response.text
    assert served.process.poll() is None
    assert "outrider_worker_restarts_total 0.0" in served.http.get("/metrics").text
    assert text(complete(served, choice=["yes"], max_tokens=8)) == "yes"


@pytest.mark.parametrize(
    "grammar",
    [rule_chain(250), terminal_chain(250), *(json_grammar(reference_chain(150, link)) for link in ("$ref", "items", "anyOf"))],
    ids=range(5),
)
def test_the_worker_compiles_the_deepest_grammars_that_pass(served: Served, grammar: str) -> None:
    complete(served, grammar=grammar, max_tokens=4)
