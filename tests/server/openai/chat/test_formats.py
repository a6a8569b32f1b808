"""Chat completions: formats of calls and reasoning, as the chat template or the settings say."""

import json
from typing import Any

import httpx
import llguidance.hf
import pytest
from llguidance import LLMatcher

from outrider import models
from outrider.verify.tokenizer import load_by_transformers
from tests.server.chat.following import accepts
from tests.server.fakes import TOKENIZER, FakeEngine, app_with, fetch
from tests.server.openai.chat.test_endpoint import MESSAGES, POINT_CALL, POINT_TOOL, SCHEMA, TOOLS, message_of


def test_markers_of_reasoning_that_are_special_tokens() -> None:
    engine = FakeEngine('Hm.[/THINK]{"x": 1}')
    template, tokens = "{{ messages[0].content }}[THINK]", ("[THINK]", "[/THINK]")
    message = message_of(engine, template, {"response_format": SCHEMA}, special_tokens=tokens)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"x": 1}')
    [request] = engine.requests
    assert request.skip_special_tokens and request.shown_tokens == [4096, 4097]
    tokenizer: Any = load_by_transformers(str(models.TARGET))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    wrapped = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    for text, valid in (('Hm.[/THINK]{"x": 1}', True), ('{"x": 1}', False), ("Hm.[/THINK]no", False)):
        matcher = LLMatcher(wrapped, request.grammar or "", log_level=0)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) == valid
    message_of(engine, template, {"skip_special_tokens": True}, special_tokens=tokens)
    assert engine.requests[-1].shown_tokens == [4096, 4097]


def test_an_unknown_format_is_warned_of_and_calls_are_read_as_hermes(caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = f"<call>f(x=1)</call> {call}"
    message = message_of(FakeEngine(*answer), template, {"tools": TOOLS})
    assert message["content"] == "<call>f(x=1)</call>" and [each["function"]["name"] for each in message["tool_calls"]] == ["f"]
    assert [record.levelname for record in caplog.records if "model.tool_format" in record.message] == ["WARNING"]
    required = message_of(FakeEngine(POINT_CALL), template, {"tools": [POINT_TOOL], "tool_choice": "required"})
    assert required["tool_calls"][0]["function"]["name"] == "f"


HARMONY = "{{ messages[0].content }}<|start|>assistant{# <|channel|><|message|> #}"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def test_harmony_answers() -> None:
    engine = FakeEngine(*f'{ANALYSIS}<|channel|>final<|message|>{{"x": 1}}')
    message = message_of(engine, HARMONY, {"response_format": SCHEMA})
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"x": 1}')
    assert accepts(engine.requests[0].grammar, '<|channel|>final<|message|>{"x": 1}')
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
    engine = FakeEngine(*f"{ANALYSIS}{call}")
    message = message_of(engine, HARMONY, {"tools": [POINT_TOOL], "tool_choice": "required"})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert accepts(engine.requests[0].grammar, call)


WITHOUT_TOOLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def answered(engine: FakeEngine, template: Any, **fields: Any) -> httpx.Response:
    return fetch(app_with(engine, template), "POST", "/v1/chat/completions", {"messages": MESSAGES, **fields})


def prompt_of(engine: FakeEngine) -> str:
    return str(TOKENIZER.decode(engine.requests[-1].prompt))


def test_a_template_without_tools_describes_them_and_reads_their_calls() -> None:
    engine = FakeEngine(*POINT_CALL)
    call = {"id": "a", "function": {"name": "f", "arguments": ""}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "R"}]
    response = answered(engine, WITHOUT_TOOLS, messages=turns, tools=[POINT_TOOL])
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    prompt = prompt_of(engine)
    assert prompt.startswith("<system>You can call these functions") and '{"name": "f"' in prompt
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in prompt and prompt.endswith("<tool>R")
    counts = []
    for tools in ([], [{"name": "f", "input_schema": {"type": "object"}}]):
        body = {"messages": MESSAGES, "max_tokens": 1, "tools": tools}
        response = fetch(app_with(FakeEngine(), WITHOUT_TOOLS), "POST", "/v1/messages/count_tokens", body)
        counts.append(response.json()["input_tokens"])
    assert counts[1] > counts[0] + 50


def test_tools_that_are_described_never_become_special_tokens() -> None:
    engine, evil = FakeEngine("a"), str(TOKENIZER.eos_token)
    tool = {"type": "function", "function": {"name": "f", "description": evil, "parameters": {"enum": [evil]}}}
    call = {"id": evil, "function": {"name": evil, "arguments": json.dumps({evil: evil})}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": evil, "tool_call_id": evil}]
    assert answered(engine, WITHOUT_TOOLS, messages=turns, tools=[tool]).status_code == 200
    assert TOKENIZER.eos_token_id not in engine.requests[0].prompt and prompt_of(engine).count(evil) == 6


@pytest.mark.parametrize("template", [WITHOUT_TOOLS, "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"])
def test_models_do_not_read_whether_a_tool_is_strict(template: str) -> None:
    engine = FakeEngine("a")
    for fields in ({}, {"strict": False}, {"strict": True}, {"strict": None}):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **fields}}
        assert answered(engine, template, tools=[tool]).status_code == 200
    assert "strict" not in prompt_of(engine) and len({tuple(request.prompt) for request in engine.requests}) == 1


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"response_format": SCHEMA}, 'schema:\n{"type": "object"'),
        ({"regex": "[0-9]+"}, "regex:\n[0-9]+"),
        ({"grammar": 'start: "a"'}, 'grammar:\nstart: "a"'),
    ],
)
def test_a_structure_beside_tools_is_described(fields: dict[str, Any], shown: str) -> None:
    for tool_choice, described in (("auto", True), ("required", True), ("none", False)):
        engine = FakeEngine("a")
        answered(engine, WITHOUT_TOOLS, tools=[POINT_TOOL], tool_choice=tool_choice, **fields)
        assert (shown in prompt_of(engine)) == described
    engine = FakeEngine("a")
    answered(engine, WITHOUT_TOOLS, **fields)
    assert shown not in prompt_of(engine)


@pytest.mark.parametrize("template", ["", {}])
def test_a_model_without_a_template_has_neither_chat_nor_tools(template: Any) -> None:
    app = app_with(FakeEngine("a"), template)
    [card] = fetch(app, "GET", "/v1/models").json()["data"]
    assert not {"chat", "tools", "reasoning"} & {*card["capabilities"]}
    refused = fetch(app, "POST", "/v1/chat/completions", {"messages": MESSAGES}).json()["error"]
    assert refused["code"] == "no_chat_template"
