"""Calls as Python calls with keyword arguments. A call is passed on when it is complete, since only then it can be parsed."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from outrider.server.chat.tools.source import Malformed, Reader, Source
from outrider.server.chat.tools.writer import CallWriter

OUTSIDE = re.compile(r"[\"'()\[\]{}]")
INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
# Models also write these names in Python calls.
JSON_NAMES = {"true": True, "false": False, "null": None}


def python_call(source: Source, writer: CallWriter) -> Reader[None]:
    """Reads a call such as `f(a=1, b="x")`. Raises Malformed."""
    name = yield from source.word()
    raw: list[str] = []
    depth = 0

    def escaped(text: str) -> None:
        raw.append(text.replace("\r", "\\r").replace("\n", "\\n"))  # models write lines of a text as they are

    yield from source.skip_space()
    if (yield from source.peek()) != "(":
        raise Malformed("(")
    while True:
        found = yield from source.until_match(OUTSIDE, raw.append)
        if found in INSIDE:
            while (yield from source.until_match(INSIDE[found], escaped)) == "\\":
                yield from source.one(raw.append)
            continue
        depth += 1 if found in "([{" else -1
        if depth == 0:
            break
    arguments = parse_arguments("".join(raw))
    if arguments is None:
        raise Malformed("call")
    writer.begin(name)
    writer.arguments(json.dumps(arguments))


def parse_arguments(source: str) -> dict[str, Any] | None:
    """The keyword arguments in parentheses; None if `source` has others, or values that are not constants."""
    try:
        node = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                return None
            arguments[keyword.arg] = ast.literal_eval(with_constants(keyword))
        json.dumps(arguments, allow_nan=False)
        return arguments
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def with_constants(keyword: ast.keyword) -> ast.expr:
    """The value of a keyword, with JSON's names for constants replaced."""
    for inner in ast.walk(keyword):
        for field, value in ast.iter_fields(inner):
            if isinstance(value, ast.Name) and value.id in JSON_NAMES:
                setattr(inner, field, ast.Constant(JSON_NAMES[value.id]))
            elif isinstance(value, list):
                value[:] = [
                    ast.Constant(JSON_NAMES[each.id]) if isinstance(each, ast.Name) and each.id in JSON_NAMES else each
                    for each in value
                ]
    return keyword.value
