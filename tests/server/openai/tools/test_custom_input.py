"""The input of custom tools, however the arguments are cut."""

from __future__ import annotations

import json

import pytest

from outrider.server.chat.tools import Part, merge_parts
from outrider.server.openai.tools.custom_input import CustomInputs, CustomPart, InputDecoder
from tests.server.chat.tools.patch_grammar import PATCH

TEXTS = [PATCH, "", 'é😀\u2028\x00"\\/', "😀" * 20, "\\u0041 \\"]


def decoded(arguments: str, size: int) -> str:
    """The input, if the arguments come in pieces of `size` characters."""
    decoder = InputDecoder()
    pieces = [decoder.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    return "".join(pieces) + decoder.finish()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_input_does_not_depend_on_the_cut(text: str, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert {decoded(arguments, size) for size in (1, 2, 3, 7, 1000)} == {text}
    assert decoded(f' {{ "input" :\n"{arguments[11:-2]}"  }} ', 1) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "a\\nb"}', "a\nb"),
        ('"plain"', "plain"),
        ("ls -l", "ls -l"),
        ('{"b": 1, "input": "x"}', "x"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "cut \\', "cut "),
        (r'{"input": "a\d \u12 \ud83d"}', "a\\d \\u12 \ufffd"),
        ("", ""),
    ],
)
def test_arguments_of_another_form_lose_nothing(arguments: str, text: str) -> None:
    assert {decoded(arguments, size) for size in (1, 4, 100)} == {text}


def test_only_calls_of_custom_tools_are_converted() -> None:
    parts = [Part("content", "So:"), Part("call", "f", 0), Part("arguments", '{"input": "1"}', 0)]
    parts += [Part("call", "patch", 1), Part("arguments", '{"input": "2', 1), Part("arguments", '\\n"}', 1)]
    parts += [Part("call", "patch", 2), Part("arguments", '{"text": "3"}', 2)]
    converted = CustomInputs({"patch"}).convert(parts, finished=True)
    assert converted[:3] == parts[:3]
    assert [type(part) for part in converted[3:]] == [CustomPart] * 5
    assert [part.text for part in merge_parts(converted[3:])] == ["patch", "2\n", "patch", "3"]
    assert [part.call for part in converted[3:]] == [1, 1, 1, 2, 2]
