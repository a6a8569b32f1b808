"""Chats: the format of answers and chunks, and the requests to the engine."""

from typing import Any

import pytest

from outrider.server.chat.reasoning_parser import THINK
from outrider.verify.sampling_params import ReasoningLimit
from tests.grammars import record
from tests.server.fakes import TOKENIZER, FakeEngine, app_with, events, fetch, post

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<think>why</think>So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_required_calls_set_a_grammar_and_only_markers_of_calls_are_shown() -> None:
    engine = FakeEngine("x")
    app = app_with(engine, special_tokens=("<tool_call>", "</tool_call>", "<|other|>"))
    for fields in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS}, {}):
        assert fetch(app, "POST", PATH, {"messages": MESSAGES, **fields}).status_code == 200
    required, optional, plain = engine.requests
    assert required.grammar is not None and optional.grammar is None
    assert required.shown_tokens == optional.shown_tokens == [4096, 4097] and plain.shown_tokens == []
    assert required.skip_special_tokens and optional.skip_special_tokens and plain.skip_special_tokens


@pytest.mark.parametrize(("asked", "content"), [(None, "a b"), (True, "a b"), (False, "a<tool_call> b")])
def test_a_marker_that_begins_no_call_is_text_only_if_special_tokens_are(asked: bool | None, content: str) -> None:
    app = app_with(FakeEngine("a", "<tool_call>", " b"), special_tokens=("<tool_call>", "</tool_call>"))
    fields = {"messages": MESSAGES, "tools": TOOLS, "skip_special_tokens": asked}
    assert fetch(app, "POST", PATH, fields).json()["choices"][0]["message"]["content"] == content


@pytest.mark.parametrize(("opened", "reasoning"), [(True, "Hello"), (False, None)])
def test_reasoning_opened_by_the_prompt(opened: bool, reasoning: str | None) -> None:
    template = "{{ messages[0].content }}" + ("<think>\n" if opened else "{# <think> #}")
    app = app_with(FakeEngine("Hel", "lo</think>42"), template)
    message = fetch(app, "POST", PATH, {"messages": MESSAGES}).json()["choices"][0]["message"]
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == ("42" if opened else "Hello</think>42")


POINT = record(x={"type": "integer"})
SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
POINT_TOOL = {"type": "function", "function": {"name": "f", "parameters": POINT}}
POINT_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def message_of(engine: FakeEngine, template: str, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    response = fetch(app_with(engine, template, **options), "POST", PATH, {"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": MESSAGES * 3000}, "messages", "at most 2048"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "may contain"),
        ({"continue_final_message": True}, "continue_final_message", "the assistant's"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ],
)
def test_invalid_chats_are_rejected(fields: dict[str, Any], param: str, words: str) -> None:
    engine = FakeEngine("x")
    response = post(engine, PATH, {"messages": MESSAGES, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert param in f"{error['param']} {error['message']}" and words in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("opened", "tokens", "limited"),
    [
        (True, (THINK.opening, THINK.closing), True),
        (False, (THINK.opening, THINK.closing), True),
        (True, (THINK.closing,), True),
        (False, (THINK.closing,), False),
    ],
)
def test_the_limit_of_reasoning_reaches_the_engine(opened: bool, tokens: tuple[str, ...], limited: bool) -> None:
    template = "{{ messages[0].content }}" + (THINK.opening if opened else "{# " + THINK.opening + " #}")
    for budget in (7, None):
        engine = FakeEngine("a")
        response = fetch(
            app_with(engine, template, tokens), "POST", PATH, {"messages": MESSAGES, "thinking_token_budget": budget}
        )
        assert response.status_code == 200
        found = engine.requests[0].reasoning
        assert (found is not None) == (limited and budget is not None)
        if found is not None:
            size = len(TOKENIZER)
            closing = size + tokens.index(THINK.closing)
            assert found == ReasoningLimit(7, closing, None if opened else size)


SECOND_CALL = CALL.partition("So:")[2].replace('"a": 1', '"a": 2')
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


@pytest.mark.parametrize(("choice", "pieces"), [("auto", [*CALL, *SECOND_CALL]), (ALLOWED, [CALL + SECOND_CALL])])
def test_parallel_calls_that_are_off_end_the_answer_before_the_second(choice: Any, pieces: list[str]) -> None:
    fields = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    app = app_with(FakeEngine(*pieces, "no more", finish="length"))
    [answer] = fetch(app, "POST", PATH, fields).json()["choices"]
    [call] = answer["message"]["tool_calls"]
    assert (answer["finish_reason"], call["function"]["arguments"]) == ("tool_calls", '{"a": 1}')
    chunks = events(fetch(app, "POST", PATH, {**fields, "stream": True}))[:-1]
    deltas = [each for chunk in chunks for each in chunk["choices"]]
    assert {call["index"] for each in deltas for call in each["delta"].get("tool_calls", ())} == {0}
    assert deltas[-1]["finish_reason"] == "tool_calls" and "no more" not in str(chunks)
    [both] = fetch(app, "POST", PATH, {**fields, "parallel_tool_calls": True}).json()["choices"]
    assert len(both["message"]["tool_calls"]) == 2


SLUG = {"type": "object", "properties": {"slug": {"type": "string", "pattern": "(?!-)x", "minLength": 1}}, "required": ["slug"]}


@pytest.mark.parametrize("strict", [None, False, True])
def test_what_of_a_schema_is_not_enforced_is_named_or_refused(strict: bool | None) -> None:
    tool = {"type": "function", "function": {"name": "save", "parameters": SLUG, "strict": strict}}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": SLUG, "strict": strict}}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (PATH, {"tools": [tool], "tool_choice": "required"}, "tools.save"),
        (PATH, {"response_format": format}, "response_format"),
    ]
    for path, fields, name in cases:
        response = post(FakeEngine("a"), path, {"messages": MESSAGES, **fields})
        if strict:
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name.partition(".")[0])
            assert "'pattern' at slug cannot be enforced: regex parse error: look-around" in error["message"]
        else:
            assert (response.status_code, response.headers["x-outrider-ignored"]) == (200, f"{name}.slug.pattern")
    if not strict:
        for field in ({"json_schema": SLUG}, {"response_format": {"type": "json_object", "schema": SLUG}}):
            response = post(FakeEngine("a"), "/v1/completions", {"prompt": "x", **field})
            assert response.headers["x-outrider-ignored"] == f"{next(iter(field))}.slug.pattern"
        assert "x-outrider-ignored" not in post(FakeEngine("a"), PATH, {"messages": MESSAGES, "tools": [tool]}).headers
