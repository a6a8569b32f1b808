"""Calls without their format's markers: in every format, an object that can only be a call is one."""

import json

import pytest

from outrider.server.chat.tools import FORMATS, tool_parser
from outrider.server.chat.tools.parts import Part, merge_parts
from tests.server.chat.tools.samples import FUNCTIONS, Call
from tests.server.chat.tools.test_parser import content_and_calls, each_format, parse

OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 1}}'
CALLED: list[Call] = [("get_weather", {"city": "Oslo", "days": 2})]


def in_format(format: str, text: str) -> str:
    """The text as the content of an answer."""
    return f"<|channel|>final<|message|>{text}<|return|>" if format == "harmony" else text


def cuts(format: str, text: str) -> range:
    """Every fourth place; the formats, which read such calls alike, have all places together."""
    return range([*FORMATS].index(format) % 4, len(text), 4)


@each_format
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (OSLO, "", 1),
        (f"```json\n{OSLO}\n```", "", 1),
        (json.dumps(json.loads(OSLO), indent=2), "", 1),
        ('{"arguments": {"city": "Oslo", "days": 2}, "name": "get_weather"}', "", 1),
        (f"{OSLO}\n{PARIS}", "", 2),
        (f"```json\n{OSLO}\n```\n```json\n{PARIS}\n```", "", 2),
        (f"{OSLO}\n\nI will wait.", "I will wait.", 1),
        ("{" + OSLO + "}", "", 1),
        ("{" + OSLO + "}}\n", "", 1),
        ("```json\n{" + OSLO + "}\n```", "", 1),
        ("{" + OSLO + "}\n" + PARIS + "\nI will wait.", "I will wait.", 2),
    ],
)
def test_an_object_at_the_beginning_is_a_call(format: str, text: str, content: str, calls: int) -> None:
    text = in_format(format, text)
    parts = parse(format, [text])
    found_content, found = content_and_calls(parts)
    assert found[:1] == CALLED
    if not FORMATS[format].bare:  # these formats read a second call only after their separator
        assert (found_content, len(found)) == (content, calls)
    assert all(parse(format, [text[:at], text[at:]]) == parts for at in cuts(format, text))


@each_format
@pytest.mark.parametrize("before", ["<mode>act</mode>", "```python\n{}\n```\nSo I call:"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (OSLO, 1),
        (f"```json\n{OSLO}\n```", 1),
        (f"```\n{json.dumps(json.loads(OSLO), indent=2)}\n```\n\n", 1),
        (f"```json\n{OSLO}\n```\n\n```json\n{PARIS}", 2),
        ("{" + OSLO + "}\n" + PARIS, 2),
    ],
)
def test_objects_that_end_the_answer_are_calls(format: str, before: str, text: str, calls: int) -> None:
    if format == "harmony":
        return  # its calls are messages
    text = f"{before}\n\n{text}"
    parts = parse(format, [text])
    content, found = content_and_calls(parts)
    assert (content, found[:1], len(found)) == (before, CALLED, calls)
    assert all(parse(format, [text[:at], text[at:]]) == parts for at in cuts(format, text) if at >= len(before))


@each_format
@pytest.mark.parametrize(
    "text",
    [
        f"Such as:\n```json\n{OSLO}\n```\nwhich asks for Oslo.",
        f"Such as:\n{OSLO}\n\nAnd:\n{PARIS}.",
        f"Such as:\n```json\n{OSLO}\n```\n```json\n[1]\n```",
        'An answer:\n{"name": "no_tool", "arguments": {}}',
        'An answer:\n{"name": "get_weather", "arguments": {"city": "Os',
        "Code:\n```c\nint f()\n{\n}\n```",
    ],
)
def test_objects_before_other_text_are_content(format: str, text: str) -> None:
    parts = parse(format, list(in_format(format, text)))
    assert content_and_calls(parts) == (text, [])
    assert parse(format, [in_format(format, text)]) == parts


@each_format
@pytest.mark.parametrize(
    "text",
    [
        '{"answer": "Oslo"}',
        '{"name": "no_tool", "arguments": {}}',
        '{"name": "get_weather", "arguments": "Oslo"}',
        '{"name": "get_weather", "arguments": {"city": Oslo}}',
        '{"name": "get_weather", "arguments": {}, "id": 1}',
        '{"name": "get_weather", "arguments": {"city": "Os',
        "{{" + OSLO + "}}",
        '{{"name": "get_weather", "arguments": {}, "answer": "It rains."}}',
        "```python\nprint(1)\n```",
        f"Here it is: {OSLO}",
        f"```json\n[{OSLO}]\n```",
    ],
)
def test_any_other_object_is_content(format: str, text: str) -> None:
    if FORMATS[format].bare and "{" in text[:1]:
        return  # the format itself has calls without markers
    parts = parse(format, list(in_format(format, text)))
    assert content_and_calls(parts) == (text, [])


@each_format
@pytest.mark.parametrize(
    ("held", "freed"),
    [
        ('{"', "answer"),
        ('{"na', 'm": 1'),
        ('{"name": "', "other"),
        ('{"name": "get_weather", "', "id"),
        ("```py\n", "x"),
        ("`", "x"),
    ],
)
def test_text_is_held_back_only_while_it_can_be_a_call(format: str, held: str, freed: str) -> None:
    if FORMATS[format].bare or format == "harmony":
        return
    parser = tool_parser(format, FUNCTIONS)
    assert parser.feed(held) == []
    assert merge_parts(parser.feed(freed)) == [Part("content", held + freed)]


def test_without_tools_an_object_is_content() -> None:
    parser = tool_parser("hermes", {})
    assert merge_parts([*parser.feed(OSLO), *parser.finish()]) == [Part("content", OSLO)]
