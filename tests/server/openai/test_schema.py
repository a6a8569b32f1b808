"""Bodies: strict types, messages, unsupported fields by name, sampling parameters and samplers, and structured output."""

import asyncio
import json
import math
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from outrider.server.chat.grammar_job import Structure
from outrider.server.openai.conversation import Message, parse_arguments
from outrider.server.openai.samplers import INFILL_MIN_P, Sampler, Samplers, select
from outrider.server.openai.schema import MIN_TOP_P, ChatBody, CompletionBody
from outrider.verify.sampling_params import SamplingParams
from tests.server.fakes import GRAMMARS, VOCABULARY, FakeEngine, post


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "m", "prompt": "x", **fields})


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def test_every_field_reaches_the_sampling_parameters() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1, "min_tokens": 2, "ignore_eos": True}
    fields |= {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logprobs": 3}
    params = completion(**fields, logit_bias={"40": -2}).sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.min_tokens, params.ignore_eos) == ((1 << 64) - 1, 2, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (params.logit_bias, params.logprobs) == ({40: -2.0}, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3}, "less than or equal to 2"),
        ({"functions": [1]}, "'functions' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "'json_schema' is required"),
        ({"speculation": {"max_nodes": 129}}, "less than or equal to 128"),
        ({"logit_bias": {"1" * 5000: 1}}, "keys must be token ids, not '11111111111111111111'"),
        ({"logit_bias": {"1": 101}}, "values must be numbers from -100 to 100"),
        ({"logit_bias": {"1": True}}, "values must be numbers from -100 to 100"),
        ({"repetition_penalty": 1e-46}, "greater than or equal to 0.01"),
        ({"metadata": {str(number): "" for number in range(17)}}, "at most 16 pairs are allowed, not 17"),
        ({"metadata": {"x": "y" * 513}}, "value may have at most 512 characters"),
        ({"prompt": {"x": 1}}, "a string, a list of strings, or token ids"),
    ],
)
def test_invalid_fields_are_rejected(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        completion(**fields)


@pytest.mark.parametrize("value", [5e-324, 1e-46, 1e-40, 1e-6])
def test_tiny_numbers_are_sampled_as_their_limit(value: float) -> None:
    params = completion(temperature=value, top_p=value, min_p=value, presence_penalty=value).sampling_params()
    assert params.greedy and params.top_p == MIN_TOP_P
    assert completion(temperature=1e-5).sampling_params().temperature == 1e-5
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for odd in (math.inf, -math.inf, math.nan, 10**400):
            with pytest.raises(ValidationError):
                completion(**{name: odd})


def test_logprobs() -> None:
    assert (chat().num_logprobs, chat(logprobs=True).num_logprobs) == (None, 0)
    assert chat(logprobs=True, top_logprobs=4).num_logprobs == 4
    ranked = completion(best_of=3)
    assert (ranked.num_logprobs, ranked.returns_logprobs, ranked.candidates) == (0, False, 3)
    assert not completion(echo=True).returns_prompt_logprobs
    assert completion(echo=True, logprobs=0).returns_prompt_logprobs


ADAPTER: TypeAdapter[list[Sampler]] = TypeAdapter(Samplers)
VALUES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5},
    "top_k": {"top_k": 7},
    "temperature": {"temperature": 0.3},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
}
PARAMS = SamplingParams(
    seed=5, logit_bias={1: 2.0}, **{name: value for each in VALUES.values() for name, value in each.items()}
)


@pytest.mark.parametrize("name", VALUES)
def test_a_sampler_that_is_not_listed_is_off(name: str) -> None:
    defaults = SamplingParams()
    chosen = select(PARAMS, ADAPTER.validate_python([each for each in VALUES if each != name]))
    for sampler, values in VALUES.items():
        for field, value in values.items():
            assert getattr(chosen, field) == (getattr(defaults, field) if sampler == name else value)


@pytest.mark.parametrize(
    "names",
    [
        *(["top_p", "top_k"], ["min_p", "top_p"], ["top_p", "temperature"], ["temperature", "penalties"], ["magic"], "kp"),
        *(["top_p", "min_p", "temperature"], ["min_p", "temperature", "top_p"], ["infill", "top_k", "top_p"]),
    ],
)
def test_other_orders_and_names_are_refused(names: Any) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(names)
    assert ADAPTER.validate_python(["top_k", "temperature"]) and ADAPTER.validate_python(["temperature", "top_k"])
    assert {*VALUES} < {*get_args(Sampler)}


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 1.7])
@pytest.mark.parametrize(
    "names", [["min_p", "temperature"], ["min_p", "top_k", "temperature"], ["top_k", "infill", "temperature"]]
)
def test_min_p_before_the_temperature_keeps_the_tokens_that_it_keeps_without(temperature: float, names: list[Sampler]) -> None:
    chosen = select(SamplingParams(temperature=temperature, min_p=0.15), ADAPTER.validate_python(names))
    least = INFILL_MIN_P if "infill" in names else 0.15
    for ratio in (0.01, 0.14, 0.16, 0.19, 0.21, 0.9):  # of a token's probability to the likeliest one's, before the temperature
        assert (ratio ** (1 / temperature) >= chosen.min_p) == (ratio >= least)


def message(**fields: Any) -> Message:
    return Message.model_validate({"role": "user", **fields})


def test_messages_for_the_template() -> None:
    assert message(role="developer", content="x").rendered() == {"role": "system", "content": "x"}
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    rendered = message(role="assistant", tool_calls=calls, reasoning_content="why").rendered()
    assert rendered["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (rendered["content"], rendered["reasoning_content"]) == ("", "why")
    assert message(role="tool", tool_call_id="1", content="r").rendered()["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *((text, {}) for text in ("", " ", "\n", "{}", "null", '"null"', "[]", '""', '" "')),
        ('{"a": [1]}', {"a": [1]}),
        ('"{\\"a\\": 1}"', {"a": 1}),  # encoded twice
        *(
            (text, {"raw_arguments": text})
            for text in ("{a", '{"a": "b', "0", "false", "[1]", "1.5", "{'a': 1}", "[" * 100_000)
        ),
    ],
)
def test_arguments_are_an_object(arguments: str, expected: dict[str, Any]) -> None:
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize("given", [None, {}, {"a": 1}, [], 5, True])
def test_arguments_that_clients_send_in_the_place_of_text(given: Any) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    [rendered] = message(role="assistant", tool_calls=[call]).rendered()["tool_calls"]
    expected = given if isinstance(given, dict) else {"raw_arguments": json.dumps(given)} if given else {}
    assert rendered["function"]["arguments"] == expected


def test_the_forms_of_calls_and_results_before_there_were_several() -> None:
    called = message(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"}).rendered()
    assert called["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    result = message(role="function", name="f", content="1").rendered()
    assert result == {"role": "tool", "name": "f", "content": "1"}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_several_names(field: str) -> None:
    assert message(role="assistant", content="a", **{field: "why"}).rendered()["reasoning_content"] == "why"


def test_what_a_message_has_and_no_template_reads_is_named() -> None:
    assert message(role="assistant", audio={"id": "a"}, thinking={"text": "x"}, reasoning="y").ignored == ["thinking", "audio"]
    assert message(role="tool", name="f", content="x", thinking=None, audio=None).ignored == []


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LARK = 'start: "a"+\n'


def structures(**fields: Any) -> dict[str, Structure]:
    return CompletionBody.model_validate({"model": "m", "prompt": "x", **fields}).structures


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
def test_every_field_becomes_a_structure(fields: dict[str, Any], name: str, structure: tuple[str, Any]) -> None:
    assert structures(**fields) == {name: Structure(*structure)}
    assert asyncio.run(GRAMMARS.grammar(structures(**fields))).grammar


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
