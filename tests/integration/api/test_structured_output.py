"""Structured output: always valid, and equal with and without drafts, also beside other answers."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.grammars import record
from tests.requests import TOOLS, complete, text
from tests.servers import Served

WORD = {"type": "string", "maxLength": 12}
SMALL = {"type": "integer", "minimum": -99, "maximum": 99}


NUMBER = record(number={"type": "number", "minimum": 0, "maximum": 1})
SCHEMAS: list[dict[str, Any]] = [
    record(name=WORD, age=SMALL),
    record(ok={"type": "boolean"}, note={"type": ["string", "null"], "maxLength": 8}),
    record(kind={"enum": ["cat", "dog", 3, None]}),
    record(tags={"type": "array", "items": WORD, "maxItems": 3}),
    record(point={"type": "array", "prefixItems": [SMALL, SMALL], "items": False, "minItems": 2}),
    record(value={"anyOf": [record(x=SMALL), record(y=WORD)]}),
    record(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
    record(date={"type": "string", "format": "date"}),
    NUMBER,
    record(matrix={"type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": SMALL}}),
    {**record(tree={"$ref": "#/$defs/node"}), "$defs": {"node": record(left=SMALL, right={"enum": ["leaf"]})}},
    {"type": "array", "items": record(x=SMALL), "minItems": 1, "maxItems": 2},
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


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"choice": ["yes", 'no "never"']}, 'yes|no "never"'),
        ({"regex": r"\d{3}-[a-z]{2}"}, r"\d{3}-[a-z]{2}"),
        ({"grammar": 'start: "a" ("," "a")~3'}, "a,a,a,a"),
        ({"grammar": 'root ::= "(" root ")" | [0-9]{1,3}'}, r"\(*\d{1,3}\)*"),
        ({"response_format": {"type": "json_object"}}, r"\{[\s\S]*"),
    ],
)
def test_other_structures(served: Served, structure: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        fields = {**structure, "temperature": 1, "seed": seed, "max_tokens": 60}
        found = [text(complete(served, **fields, speculation={"drafter": each})) for each in ("none", "fusion", "lookup")]
        assert found[0] == found[1] == found[2]
        assert re.fullmatch(pattern, found[0])


ARITHMETIC = {"grammar": 'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"'}
RECORDS = [{"response_format": schema_format(schema)} for schema in SCHEMAS if schema is not NUMBER]
CALLS: list[dict[str, Any]] = [{"tools": TOOLS, **each} for each in ({"tool_choice": "required"}, RECORDS[0], ARITHMETIC)]
LINES = [
    {"grammar": 'start: line+\nline: "- " /[a-z ]{3,30}/ "\\n"'},
    {"grammar": 'root ::= item{2,6}\nitem ::= "- " [^\\n]{3,30} "\\n"'},
]
SENTENCE, CHOICE = {"regex": r"[A-Z][a-z]+( [a-z]+){2,12}\."}, {"choice": ["yes", "yes, of course"]}
STRUCTURES = [*RECORDS, *CALLS, *LINES, ARITHMETIC, SENTENCE, CHOICE]
SAMPLERS = [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.05}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.2}]
QUESTIONS = [
    "Tell me a story about a fox.",
    'Repeat this: {"a": [{"b": {"c": "d", "e": ["f", "g"]}}, "h"], "i": {}}',
    "What is 12 * (3 + 4)?",
]
DRAFTERS = ["fusion", "fusion", "trigram", "lookup", "lookahead", "prediction"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_answer_of_a_storm_depends_on_drafts(served: Served) -> None:
    """Hundreds of answers under any structure and sampler, three at a time."""
    chooser = random.Random(0)

    def asked(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        question = chooser.choice(QUESTIONS)
        body = {"model": served.model, "messages": [{"role": "user", "content": question}], "seed": seed}
        body |= {"prediction": {"type": "content", "content": question}, "temperature": chooser.choice([0.0, 0.8, 1.3])}
        body |= {"max_completion_tokens": chooser.choice([16, 48, 96])} | chooser.choice(SAMPLERS) | chooser.choice(STRUCTURES)
        return body, {"drafter": chooser.choice(DRAFTERS), "max_nodes": chooser.choice([8, 16, 32])}

    def answer(body: dict[str, Any], speculation: dict[str, Any]) -> Any:
        """What the model has said, without ids."""
        response = served.http.post("/v1/chat/completions", json=body | {"speculation": speculation})
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
        return choice["finish_reason"], choice["message"]["content"], calls

    def check(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
        assert answer(*pair) == answer(pair[0], {"drafter": "none"}), pair

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(check, [asked(number) for number in range(150)]))
