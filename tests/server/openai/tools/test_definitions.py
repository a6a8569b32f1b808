"""Custom tools as functions, and the choice among tools."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.chat.grammar_job import GrammarJob
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.http.errors import APIError
from outrider.server.openai.schema import ChatBody
from tests.server.chat.following import accepts
from tests.server.chat.tools.patch_grammar import PATCH, PATCH_GRAMMAR


def custom(name: str = "patch", **format: Any) -> dict[str, Any]:
    """A custom tool with a grammar, if one is given."""
    grammar = {"format": {"type": "grammar", "grammar": format}} if format else {}
    return {"type": "custom", "custom": {"name": name, "description": "Edits files.", **grammar}}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


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
    with closing(GrammarChecker()) as checker:
        built = asyncio.run(checker.check(GrammarJob(functions=functions, inputs=body.enforced_inputs)))
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": %s}}\n</tool_call>'
    assert accepts(built.grammar, call % json.dumps(text)) and not accepts(built.grammar, call % json.dumps(other))


def test_a_grammar_that_cannot_be_enforced_is_an_error_only_of_a_required_call() -> None:
    recursive = custom(syntax="lark", definition='start: "(" start ")" | "x"')
    assert chat(recursive).enabled_tools
    required = chat(recursive, choice="required").enforced_inputs
    words = "grammar of tool 'patch' cannot be enforced: its rule 'start' is recursive"
    with closing(GrammarChecker()) as checker, pytest.raises(APIError, match=words):
        asyncio.run(checker.check(GrammarJob(functions={"patch": {}}, inputs=required)))
    assert chat(recursive, function("f"), choice=named("f")).enforced_tools[0].name == "f"


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
