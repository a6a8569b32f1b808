"""Calls as text: the parser of each format reads what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.server.chat.template.tool_text import calls_text
from outrider.server.chat.tools import FORMATS, tool_parser

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look", {"city": "São \"Paulo\"", "days": 3}),
    ("look", {"city": "5", "deep": {"a": [1, None, True], "b": {"c": "x"}}}),
    ("now", {}),
]  # fmt: skip
READ_BY = {"harmony": "hermes"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_reads_the_calls(name: str) -> None:
    parser = tool_parser(READ_BY.get(name, name), {"look": SCHEMA, "now": {"type": "object", "properties": {}}})
    parts = [*parser.feed(calls_text(CALLS, FORMATS[name])), *parser.finish()]
    assert not [part for part in parts if part.kind == "content"]
    found = [
        (part.text, json.loads("".join(each.text for each in parts if each.kind == "arguments" and each.call == part.call)))
        for part in parts
        if part.kind == "call"
    ]
    assert found == CALLS
