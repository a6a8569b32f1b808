"""Calls as Python calls with keyword arguments. A call is passed on when it is complete, since only then it can be parsed."""

import ast
import json
import re
from typing import Any

from outrider.server.chat.tools.parts import CallWriter
from outrider.server.chat.tools.source import Malformed, Reader, Source

OUTSIDE = re.compile(r"[\"'()\[\]{},]")
INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
# What the name of an argument has not: other than Python's names, it may be a keyword or have hyphens.
NOT_IN_NAMES = re.compile(r"[=\"'()\[\]{},*#\\]")
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
    if not (yield from source.match("(")):
        raise Malformed("(")
    arguments: list[str] = []
    depth = 1
    while depth:
        found = yield from source.until_match(OUTSIDE, raw.append)
        if found in INSIDE:
            while (yield from source.until_match(INSIDE[found], escaped)) == "\\":
                yield from source.one(raw.append)
            continue
        depth += {",": 0}.get(found, 1 if found in "([{" else -1)
        if depth == 0 or (depth == 1 and found == ","):
            arguments.append("".join(raw)[:-1])
            raw.clear()
    values = parse_arguments(arguments)
    if values is None:
        raise Malformed("call")
    writer.begin(name)
    writer.arguments(json.dumps(values))


def parse_arguments(sources: list[str]) -> dict[str, Any] | None:
    """The keyword arguments; None if there are others, or values that are not constants."""
    if not sources[-1].strip():  # after a comma, or between empty parentheses
        sources = sources[:-1]
    arguments: dict[str, Any] = {}
    try:
        for source in sources:
            name, _, value = source.partition("=")
            name = name.strip()
            if not name or name in arguments or not value.strip() or NOT_IN_NAMES.search(name):
                return None
            arguments[name] = ast.literal_eval(WithConstants().visit(ast.parse(f"({value})", mode="eval")))
        json.dumps(arguments, allow_nan=False)
        return arguments
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class WithConstants(ast.NodeTransformer):
    """Replaces JSON's names for constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node
