"""Hundreds of answers under grammars, three at a time: none fails, and each drafted one is that of plain decoding."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.servers import Served

PAIRS = 150
STREAMS = 3
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in (("at", POINT), ("add", PERSON))
]
ARITHMETIC = 'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"'
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
STRUCTURES: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": FORMAT},
    {"regex": r"[A-Z][a-z]+( [a-z]+){2,12}\."},
    {"regex": r"(\d{1,3}, ){3,9}\d{1,3}"},
    {"choice": ["yes", "yes, of course", "no", "no, never", "perhaps"]},
    {"grammar": ARITHMETIC},
    {"grammar": 'start: line+\nline: "- " /[a-z ]{3,30}/ "\\n"'},
    {"grammar": 'root ::= item{2,6}\nitem ::= "- " [^\\n]{3,30} "\\n"'},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
    {"tools": TOOLS, "response_format": FORMAT},
    {"tools": TOOLS, "response_format": {"type": "json_object"}},
    {"tools": TOOLS, "grammar": ARITHMETIC},
]
SAMPLERS: list[dict[str, Any]] = [
    {},
    {},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.05},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.2},
]
QUESTIONS = [
    "Tell me a story about a fox.",
    "Write a JSON object with the names and ages of three friends.",
    'Repeat this: {"a": [{"b": {"c": "d", "e": ["f", "g"]}}, "h"], "i": {}}',
    "What is 12 * (3 + 4)?",
    "Who are you?",
]
DRAFTERS = ["fusion", "fusion", "trigram", "lookup", "lookahead", "prediction"]


def bodies(model: str, seed: int, pairs: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of requests that differ in their drafter only; the first has none."""
    chooser = random.Random(seed)
    for number in range(pairs):
        question = chooser.choice(QUESTIONS)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "prediction": {"type": "content", "content": question},
            "temperature": chooser.choice([0.0, 0.8, 1.0, 1.3]),
            "seed": number,
            "max_completion_tokens": chooser.choice([16, 48, 96]),
            **chooser.choice(SAMPLERS),
            **chooser.choice(STRUCTURES),
        }
        drafted = {"drafter": chooser.choice(DRAFTERS), "max_nodes": chooser.choice([8, 16, 32])}
        yield {**body, "speculation": {"drafter": "none"}}, {**body, "speculation": drafted}


def answer(http: httpx.Client, body: dict[str, Any]) -> Any:
    """What the model has said, without ids; the error if there is one."""
    response = http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return response.text
    [choice] = response.json()["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return choice["finish_reason"], choice["message"]["content"], calls


def storm(http: httpx.Client, model: str, seed: int, pairs: int) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The pairs of answers that differ, or of which one is an error; with the drafted request."""

    def differing(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any, dict[str, Any]] | None:
        plain, drafted = (answer(http, body) for body in pair)
        return None if plain == drafted and not isinstance(plain, str) else (plain, drafted, pair[1])

    with ThreadPoolExecutor(STREAMS) as pool:
        return [found for found in pool.map(differing, bodies(model, seed, pairs)) if found is not None]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_answer_under_a_grammar_depends_on_drafts(served: Served) -> None:
    assert storm(served.http, served.model, 0, PAIRS) == []
