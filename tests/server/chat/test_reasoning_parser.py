"""Reasoning, content and calls are separated, however the text is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.reasoning_parser import ReasoningParser
from server.chat.tool_parsers import JsonToolParser, Part, merge_parts

CASES: list[tuple[bool, str, list[Part]]] = [
    (False, "<think>\nAdd them.\n</think>\n\n42", [Part("reasoning", "Add them."), Part("content", "42")]),
    (True, "Add them.\n\nSlowly.</think>42", [Part("reasoning", "Add them.\n\nSlowly."), Part("content", "42")]),
    (False, "42 <think>", [Part("content", "42 <think>")]),
    (False, "<thin", [Part("content", "<thin")]),
    (False, "<think>cut off", [Part("reasoning", "cut off")]),
    (False, "<think></think>42", [Part("content", "42")]),
    (
        False,
        '<think>a</think>b\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [Part("reasoning", "a"), Part("content", "b"), Part("call", "f"), Part("arguments", "{}")],
    ),
]


@pytest.mark.parametrize(("opened", "text", "parts"), CASES)
def test_parts(opened: bool, text: str, parts: list[Part]) -> None:
    for pieces in ([text], list(text)):
        parser = ReasoningParser(JsonToolParser("<tool_call>", "</tool_call>"), True, opened)
        assert merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish()) == parts


@given(st.text(st.sampled_from("ab <>/think\n"), max_size=40), st.integers(0, 40), st.booleans())
def test_parts_do_not_depend_on_how_the_text_is_split(text: str, at: int, opened: bool) -> None:
    parser, halves = ReasoningParser(None, True, opened), ReasoningParser(None, True, opened)
    expected = merge_parts(parser.feed(text) + parser.finish())
    assert merge_parts(halves.feed(text[:at]) + halves.feed(text[at:]) + halves.finish()) == expected


def test_without_reasoning_everything_is_content() -> None:
    parser = ReasoningParser()
    assert parser.feed("<think>x") + parser.finish() == [Part("content", "<think>x")]
