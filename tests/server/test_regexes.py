"""Every regular expression that a client's text meets takes time linear in the text, and every use is known here."""

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.server.anthropic.conversion import BILLING_LINE
from outrider.server.chat.plain_text import MARK, START
from outrider.server.chat.tools.call_ids import HASHED
from outrider.server.chat.tools.harmony import HEADER
from outrider.server.chat.tools.lark import Lark
from outrider.server.chat.tools.lark_pattern import escape, lark_pattern, tokenize
from outrider.server.chat.tools.python_calls import INSIDE, OUTSIDE
from outrider.server.chat.tools.source import DIGITS, NAME, QUOTED, SCALAR, SPACE, STRUCTURE
from outrider.server.http import ignored
from outrider.server.http.auth import REQUEST_ID
from outrider.server.http.json_body import without_halves
from outrider.server.http.protocol import HOST
from outrider.server.ollama.schema import DURATION, PART
from outrider.server.openai.tools.custom_input import CHARACTERS, ESCAPE, OPENING, SURROGATES
from outrider.server.telemetry.logs import CONTROLS

SIZE = 200_000  # characters, whose square is minutes of work
HEADER_START = "<|start|>assistant to=a<|channel|>analysis"

Use = Callable[[str], Any]
# By module: a use of `re`, what begins a text, what is repeated, and what ends it so that nothing matches.
USES: dict[str, list[tuple[Use, str, str, str]]] = {
    "chat.tools.lark_pattern": [
        *((tokenize, "{1", part, "x") for part in (" ", "\t", "1", ",", "\n")),
        *((tokenize, "{1,", part, "x") for part in (" ", "1", " 1")),
        *((tokenize, "~1", part, "x") for part in (" ", "1", " .", ".. ")),
        *((tokenize, begin, part, "\n$") for begin in '"/' for part in ("a", "\\a", "\\")),
        *((tokenize, "", part, "$") for part in (" ", "\r\n ", "a", ".1", "//", "?", "a.1:", '"a"i')),
        *((lark_pattern, "start: ", part, "") for part in ("{1 ", "~ 1", '"a" ', "/a/ ", "( ")),
        (escape, "", "\\", ""),
    ],
    "chat.tools.harmony": [
        *((HEADER.fullmatch, HEADER_START, part, "x") for part in (" ", "\n", "a", "json ")),
        (HEADER.fullmatch, f"{HEADER_START}<|constrain|>", " ", "x"),
        (HEADER.fullmatch, " to=", "a<|channel|>analysis", "x"),
    ],
    "chat.tools.source": [
        *((each.search, "", part, "!") for each in (NAME, DIGITS, SPACE, SCALAR) for part in ("1", " ", "~")),
        *((each.search, "", "a", "") for each in (QUOTED, STRUCTURE)),
    ],
    "chat.tools.python_calls": [(each.search, "", "a", "") for each in (OUTSIDE, *INSIDE.values())],
    "chat.tools.call_ids": [(HASHED.fullmatch, "", "a", "!")],
    "chat.tools.lark": [(Lark({"<a>": 1, "<ab>": 2}).text, "", "<a", "")],
    "chat.plain_text": [(partial(MARK.sub, ""), *each) for each in (("", "1", "x"), (START, "1", "x"), ("", START, "x"))],
    "anthropic.conversion": [(BILLING_LINE.match, "x-anthropic-billing-header:", *each) for each in (("\n", "x"), ("a", ""))],
    "http.ignored": [(ignored.NAME.fullmatch, "a", part, "!") for part in (".", "a", ".a", "a" * 64 + ".")],
    "openai.tools.custom_input": [
        *((OPENING.match, begin, " ", "x") for begin in ("", "{", '{"input"', '{"input":')),
        *((CHARACTERS.match, "", part, "\\") for part in ("a", "\\u", "\\ud800", "\\\\", "\\u1")),
        *((partial(ESCAPE.sub, ""), "", part, "\\") for part in ("\\u", "\\", "a")),
        (SURROGATES.search, "", "a", ""),
    ],
    "ollama.schema": [
        *((DURATION.fullmatch, "", part, "!") for part in ("1", "1h", "1.1m", "h", "-")),
        *((PART.findall, "", part, "") for part in ("1", "h", ".")),
    ],
    "http.json_body": [(lambda text: without_halves(text.encode()), "", part, "\\") for part in ("\\ud83c", "\\u", "\\", "a")],
    "http.auth": [(REQUEST_ID.fullmatch, "", "a", "!")],
    "http.protocol": [(lambda text: HOST.fullmatch(text.encode()), "", "a", "/")],
    "telemetry.logs": [(partial(CONTROLS.sub, ""), "", "\n", "")],
}
# Patterns that no client's text meets, or only as alternatives of literals.
OTHERS = {
    "chat.gbnf.parser": "a class of characters at a time",
    "chat.schemas.keywords": "names of definitions",
    "chat.schemas.notes": "names of properties",
    "chat.tools.gemma": "names of arguments",
    "chat.plain_text": "alternatives of the model's tokens",
    "chat.vocabulary": "the model's tokens",
    "chat.template.chat_template": "the model's template",
    "openai.output_parser": "alternatives of the model's tokens",
    "settings.models": "settings",
    "settings.access": "settings",
    "ollama.description": "names of the operator's files",
    "models.catalog": "settings and the operator's files",
    "datastore_tree": "the operator's files",
    "terminal.own_server": "the server's first line",
    "launch.command": "names of models",
    "ray.command": "an argument of the command",
    "http.exposition": "the server's metrics",
    "encoders.service": "settings",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("use", "begin", "part", "end"), [each for uses in USES.values() for each in uses])
def test_long_text_is_read_in_linear_time(use: Use, begin: str, part: str, end: str) -> None:
    """With the outcome of a short text, unless it is refused; quadratic time would exceed the test's time limit."""
    long, short = (outcome(use, begin + part * count + end) for count in (SIZE // len(part), 4))
    assert long in (short, ValueError)


def outcome(use: Use, text: str) -> type:
    """The type of what is found, or ValueError."""
    try:
        return type(use(text))
    except ValueError:
        return ValueError


def test_every_use_of_re_is_known() -> None:
    root = Path(__file__).parents[2] / "server"
    found = set()
    for path in sorted(path for path in root.rglob("*.py") if "import re\n" in path.read_text()):
        names = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        if any(isinstance(node.value, ast.Name) and node.value.id == "re" and node.attr in vars(re) for node in names):
            found.add(".".join(path.relative_to(root).with_suffix("").parts))
    assert found == {*USES, *OTHERS}
