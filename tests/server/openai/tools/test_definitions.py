"""Custom tools as functions, the choice among tools, and the input of calls, however the arguments are cut."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.chat.grammar_job import GrammarJob
from outrider.server.chat.tools import Part, merge_parts
from outrider.server.http.errors import APIError
from outrider.server.openai.schema import ChatBody
from outrider.server.openai.tools.custom_input import CustomInputs, CustomPart, InputDecoder
from tests.server.chat.following import accepts
from tests.server.chat.tools.patch_grammar import PATCH, PATCH_GRAMMAR
from tests.server.fakes import GRAMMARS


def custom(name: str = "patch", **format: Any) -> dict[str, Any]:
    grammar = {"format": {"type": "grammar", "grammar": format}} if format else {}
    return {"type": "custom", "custom": {"name": name, "description": "Edits files.", **grammar}}


def chat(*tools: dict[str, Any], choice: Any = None) -> ChatBody:
    messages = [{"role": "user", "content": "x"}]
    return ChatBody.model_validate({"model": "m", "messages": messages, "tools": list(tools), "tool_choice": choice})


def named(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


@pytest.mark.parametrize(
    ("syntax", "definition", "text", "other"),
    [("lark", PATCH_GRAMMAR, PATCH, "edit a.py"), ("regex", r"[a-z]+ \d+", "abc 12", "12"), ("regex", "a|b", "b", "bc")],
)
def test_the_grammar_of_a_required_call_is_enforced(syntax: str, definition: str, text: str, other: str) -> None:
    body = chat(custom(syntax=syntax, definition=definition), choice=named("patch", "custom"))
    functions = {tool.name: tool.function.parameters for tool in body.enforced_tools}
    built = asyncio.run(GRAMMARS.check(GrammarJob(functions=functions, inputs=body.enforced_inputs)))
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": %s}}\n</tool_call>'
    assert accepts(built.grammar, call % json.dumps(text)) and not accepts(built.grammar, call % json.dumps(other))


def test_a_grammar_that_cannot_be_enforced_is_an_error_only_of_a_required_call() -> None:
    recursive = custom(syntax="lark", definition='start: "(" start ")" | "x"')
    assert chat(recursive).enabled_tools
    required = chat(recursive, choice="required").enforced_inputs
    words = "grammar of tool 'patch' cannot be enforced: its rule 'start' is recursive"
    with pytest.raises(APIError, match=words):
        asyncio.run(GRAMMARS.check(GrammarJob(functions={"patch": {}}, inputs=required)))
    assert chat(recursive, {"type": "function", "function": {"name": "f"}}, choice=named("f")).enforced_tools[0].name == "f"


def test_the_grammars_of_all_tools_are_bounded() -> None:
    tools = [custom(f"t{number}", syntax="regex", definition="x" * 30_000) for number in range(3)]
    assert len(chat(*tools[:2]).custom_tools) == 2
    with pytest.raises(ValidationError, match="grammars of all custom tools may have at most"):
        chat(*tools)


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([{"type": "web_search"}], None, "type 'function' or 'custom'"),
        ([custom()], named("other", "custom"), "names 'other', which is not one of"),
        ([custom()], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("h")]}}, "names 'h'"),
        ([custom(syntax="ebnf", definition="x")], None, "'lark' or 'regex'"),
    ],
)
def test_invalid_tools_are_rejected(tools: list[dict[str, Any]], choice: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        chat(*tools, choice=choice)


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


FORMS = [('{"patch": "a\\nb"}', "a\nb"), ('"plain"', "plain"), ("ls -l", "ls -l"), ('{"b": 1, "input": "x"}', "x"), ("", "")]
FORMS += [('{"input": "cut of', "cut of"), ('{"input": "cut \\', "cut ")]
FORMS += [(r'{"input": "a\d \u12 \ud83d"}', "a\\d \\u12 \ufffd")]


@pytest.mark.parametrize(("arguments", "text"), FORMS)
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
