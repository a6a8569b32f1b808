"""SmolLM2-135M-Instruct answers through every endpoint: it knows a capital, stops by itself, and keeps to grammars."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from outrider.models import packaged
from tests.grammars import record
from tests.integration.real.questions import CAPITAL, SAMPLING, Comparison, chat, text
from tests.requests import TOOL_SCHEMAS, TOOLS
from tests.servers import Served, serving
from tests.slow import mostly_slow

PLACE = record(city={"type": "string", "maxLength": 20}, country={"type": "string", "maxLength": 20})


def test_the_capital_of_france(real: Served) -> None:
    answer = chat(real, CAPITAL)
    assert real.model == answer["model"] == "SmolLM2-135M-Instruct"
    assert "Paris" in text(answer) and "<|" not in text(answer)
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] < 40


def test_the_template_and_its_tokens(real: Served) -> None:
    body = {"model": real.model, "messages": [{"role": "user", "content": "Hi<|im_end|>"}], "return_token_strs": True}
    answer = real.http.post("/tokenize", json=body).json()
    ids = answer["tokens"]
    assert real.http.post("/detokenize", json={"model": real.model, "tokens": ids}).json()["prompt"] == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(1), ids.count(2)) == (3, 2)  # the third <|im_end|> is the user's, and text


def test_a_json_schema_is_followed(real: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    asked = "Paris is the capital of France and has two million people."
    answer = chat(real, asked, response_format=schema)
    place = json.loads(text(answer))
    jsonschema.validate(place, PLACE)
    assert place["city"] == "Paris"
    plain = chat(real, asked, response_format=schema, speculation={"drafter": "none"})
    assert text(plain) == text(answer)


def test_a_required_tool_is_called(real: Served) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    choice = chat(real, "What is the weather in Paris?", **fields)["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, TOOL_SCHEMAS["weather"])
    assert arguments["city"] == "Paris"


FORMATS: dict[str, tuple[str, ...]] = {"blocks of the file": ()}
FORMATS |= {dtype: ("--model.dtype", dtype) for dtype in ("float32", "bfloat16")}
FORMATS |= {bits: ("--model.quantize", bits) for bits in ("int8", "int4")}
FORMATS |= {f"{kind} cache": ("--model.kv_dtype", kind) for kind in ("int8", "fp8")}
# The file's blocks are what a user serves first, so `make test` has them, too.
CASES = mostly_slow(FORMATS, "blocks of the file")


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, file: str) -> Iterator[Served]:
    # With a fixed number of nodes, no costs are measured at the start.
    with serving("--model", packaged.SMOLLM2, "--speculation.max_nodes", "12", *FORMATS[request.param]) as server:
        yield server


def test_a_rows_bits_depend_on_its_text_alone(served: Served) -> None:
    assert httpx.get(f"{served.url}/version").json()["invariant_rows"] == "on, by construction"


@pytest.mark.parametrize("sampling", mostly_slow(SAMPLING, "sampled"))
def test_drafts_and_company_change_no_answer(served: Served, sampling: str) -> None:
    assert Comparison(served).check_company(sampling) > 0
