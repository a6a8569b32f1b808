"""Reasoning, content and calls at every cut; formats of response templates read what the parser of transformers does."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from outrider.server.chat.reasoning_parser import REASONING_FORMATS, ReasoningFormat, ReasoningParser, detect_reasoning
from outrider.server.chat.response_template import EXAMPLE_CALL, derive_reasoning, derive_tools
from outrider.server.chat.tools import Part, calls_grammar, merge_parts, tool_parser
from outrider.server.chat.tools.source import overlap
from tests.server.chat.following import accepts
from tests.server.chat.tools.samples import CITY, CLOCK, FUNCTIONS, WEATHER
from tests.server.chat.tools.test_parser import content_and_calls


def into(name: str, arguments: str) -> dict[str, Any]:
    """The field of a template that makes calls of what was read."""
    return {"transform": {"type": "function", "function": {"name": f"{{{name}}}", "arguments": f"{{{arguments}}}"}}}


JSON: dict[str, Any] = {"content": "json", "repeats": True, **into("name", "content")}
THINKING = {"open": "<|THINK|>\n", "close": ["<|/THINK|>"]}
OBJECT = '{"name": "outrider_example", "arguments": {"city": "Rome"}}'


def template(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A response template with this field of tool calls."""
    return {"start_anchor": "<|bot|>", "fields": {"tool_calls": calls, "content": {"close": "<|end|>"}, **fields}}


CASES = {
    "objects": (
        {**JSON, "open": "<|CALL|>", "close": "<|/CALL|>", "transform": {"type": "function", "function": "{content}"}},
        f'<|CALL|>{{"name": "get_weather", "arguments": {CITY}}}<|/CALL|>'
        '<|CALL|>{"name": "clock", "arguments": {}}<|/CALL|>',
    ),
    "keys of objects": (
        {**JSON, "open_pattern": r"\s*<\|CALL\|>", "close": "<|/CALL|>", **into("content.tool", "content.args")},
        f'<|CALL|>{{"tool": "get_weather", "args": {CITY}}}<|/CALL|><|CALL|>{{"tool": "clock", "args": {{}}}}<|/CALL|>',
    ),
    "list": (
        {
            "open": "<|ACTION|>",
            "close": "<|/ACTION|>",
            "content": "json",
            "transform_each": True,
            **into("tool_name", "parameters"),
        },
        f'<|ACTION|>[{{"tool_name": "get_weather", "parameters": {CITY}}}, '
        '{"tool_name": "clock", "parameters": {}}]<|/ACTION|>',
    ),
    "names before JSON": (
        {**JSON, "open_pattern": r"<call\.(?P<name>[\w.-]+)>", "close": "</call>"},
        f"<call.get_weather>{CITY}</call><call.clock>{{}}</call>",
    ),
    "tags": (
        {
            **JSON,
            "open_pattern": r"\s*<use>\s*<tool=(?P<name>[^>\n]+)>",
            "close_pattern": r"</tool>\s*</use>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</arg>"},
        },
        '<use>\n<tool=get_weather><arg=city>\nSan "José"\n</arg><arg=days>\n3\n</arg><arg=tags>\n["a", "b c"]\n</arg>'
        "</tool>\n</use><use>\n<tool=clock></tool>\n</use>",
    ),
    "values of Gemma": (
        {
            **JSON,
            "open_pattern": r"<\|tool>call:(?P<name>\w+)",
            "close": "<tool|>",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
        '<|tool>call:get_weather{city:<|"|>San "José"<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b c<|"|>]}<tool|>'
        "<|tool>call:clock{}<tool|>",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_derived_calls_are_those_of_transformers_at_every_cut_and_enforced(name: str) -> None:
    field, text = CASES[name]
    schemas = [{"type": "function", "function": {"name": key, "parameters": value}} for key, value in FUNCTIONS.items()]
    message = parse_response(text, template(field), prefix="", tools=schemas)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [WEATHER, CLOCK]
    format = derive_tools(template(field))
    assert format is not None
    assert accepts(calls_grammar(format, FUNCTIONS, 8, {}), text)
    assert not accepts(calls_grammar(format, FUNCTIONS, 8, {}), "Hello")
    for before, after in (("", ""), ("Let me see. ", "")):
        for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
            parser = tool_parser(format, FUNCTIONS)
            parts = [part for piece in (before, *pieces, after) for part in parser.feed(piece)] + parser.finish()
            assert content_and_calls(parts) == (before.rstrip(), calls)


@pytest.mark.parametrize(
    "change",
    [
        {"content": "kv-lines"},
        {"content": "xml-inline"},
        {"content": "xml-inline", "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>.*?);"}},
        {"content_args": {"string_delims": [["'", "'"]]}},
        {"open_pattern": r"<(?:call|use)>(?P<name>\w+)"},
        {"open_pattern": r"<call>(?P<name>\w+)(?P<id>\d+)"},
        {"open_pattern": None, "open": ["<call>", "<use>"]},
        {"transform": {"function": {"name": "{name}", "arguments": {"all": "{content}"}}}},
    ],
    ids=str,
)
def test_what_a_format_cannot_express_is_not_derived(change: dict[str, Any]) -> None:
    field = {**CASES["names before JSON"][0], **change}
    assert derive_tools(template(field)) is None


@pytest.mark.parametrize(
    ("rendered", "used"),
    [
        ("", True),
        ("<|user|>Go on.<|bot|>", True),
        (f"Call as <|CALL|>this<|/CALL|>.<|user|>Go on.<|bot|><|CALL|>{OBJECT}<|/CALL|><|end|>", True),
        (f"<|bot|><|CALL|><json>{OBJECT}</json><|/CALL|>", False),
        (f"<|bot|>[{OBJECT}]", False),
        ('<|bot|><|CALL|>{"name": "outrider_example", "arguments": "{}"}<|/CALL|>', False),
        ('<|bot|><|CALL|>{"name": "outrider_example", "arguments": {"city"', False),
    ],
)
def test_a_format_that_misreads_the_chat_template_is_not_used(rendered: str, used: bool) -> None:
    assert json.loads(OBJECT) == EXAMPLE_CALL["function"]
    assert (derive_tools(template(CASES["objects"][0]), rendered) is not None) == used


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("wrapper", [("", ""), ("<|ANSWER|>", "<|/ANSWER|>")])
def test_derived_reasoning_at_every_cut(name: str, wrapper: tuple[str, str]) -> None:
    content = {"open": wrapper[0], "close": wrapper[1]} if wrapper[0] else {"close": "<|end|>"}
    spec = template(CASES["objects"][0], **{name: THINKING, "content": content})
    format = derive_reasoning(spec)
    assert format is not None
    for opened, thoughts in ((False, ""), (False, "<|THINK|>\nHm, < so.<|/THINK|>"), (True, "Hm, < so.<|/THINK|>")):
        text = thoughts + "Yes.".join(wrapper)
        expected = parse_response(text, spec, prefix="<|bot|><|THINK|>\n" if opened else "<|bot|>")
        for at in range(len(text)):
            parser = ReasoningParser(None, True, opened, format)
            parts = merge_parts([*parser.feed(text[:at]), *parser.feed(text[at:]), *parser.finish()])
            found = {part.kind: part.text for part in parts}
            assert (found.get("reasoning"), found.get("content")) == (expected.get(name), expected["content"])


TEMPLATES = {
    "harmony": "<|channel|>analysis<|message|>",
    "gemma": "<|turn>model {{- '<|channel>thought\\n<channel|>' -}}",
    "seed": "{%- set think_begin_token = '<seed:think>' -%}",
    "mistral": "[THINK]{{ block['thinking'] }}[/THINK]",
    "granite": "thoughts between <think></think> and write your response between <response></response>",
    "think": "{{ '<think>' + reasoning_content }}",
}
BY_NAME = {format.name: format for format in REASONING_FORMATS}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_format_is_detected_from_the_template(name: str) -> None:
    assert detect_reasoning(TEMPLATES[name]) == BY_NAME[name]
    assert detect_reasoning("{{ message.content }}") is None


@pytest.mark.parametrize("format", [format for format in REASONING_FORMATS if not format.channels], ids=lambda each: each.name)
@pytest.mark.parametrize("opened", [False, True])
def test_every_format_at_every_cut(format: ReasoningFormat, opened: bool) -> None:
    answer = "Yes.".join(format.wrapper or ("", ""))
    text = f"{'' if opened else format.opening}\nHm, < so. {format.closing}\n\n{answer}"
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        parser = ReasoningParser(None, True, opened, format)
        parts = merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        assert parts == [Part("reasoning", "Hm, < so."), Part("content", "Yes.")]


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_the_longest_overlap_is_found(text: str, marker: str) -> None:
    sizes = [size for size in range(len(marker)) if text.endswith(marker[:size])]
    assert overlap(text, marker) == max(sizes)
