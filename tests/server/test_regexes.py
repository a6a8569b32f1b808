"""Every regular expression that a client's text meets takes time linear in the text, and every use is known here."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.server.anthropic.conversion import BILLING_LINE
from outrider.server.chat import marks
from outrider.server.chat.tools.call_ids import HASHED
from outrider.server.chat.tools.harmony import HEADER
from outrider.server.chat.tools.lark import Lark
from outrider.server.chat.tools.lark_pattern import escape, lark_pattern, tokenize
from outrider.server.chat.tools.python_calls import INSIDE, OUTSIDE
from outrider.server.chat.tools.source import DIGITS, NAME, QUOTED, SCALAR, SPACE, STRUCTURE
from outrider.server.http import ignored
from outrider.server.http.auth import REQUEST_ID
from outrider.server.http.protocol import HOST
from outrider.server.openai.tools.custom_input import CHARACTERS, ESCAPE, OPENING, SURROGATES
from outrider.server.telemetry.logs import CONTROLS

SIZE = 200_000  # characters, whose square is minutes of work
HEADER_START = "<|start|>assistant to=a<|channel|>analysis"

Use = Callable[[str], Any]
# A use of `re`, what begins a text, what is repeated, and what ends it so that nothing matches.
USES: list[tuple[str, Use, str, str, str]] = [
    *(("outrider.server.chat.tools.lark_pattern", tokenize, "{1", part, "x") for part in (" ", "\t", "1", ",", "\n")),
    *(("outrider.server.chat.tools.lark_pattern", tokenize, "{1,", part, "x") for part in (" ", "1", " 1")),
    *(("outrider.server.chat.tools.lark_pattern", tokenize, "~1", part, "x") for part in (" ", "1", " .", ".. ")),
    *(
        ("outrider.server.chat.tools.lark_pattern", tokenize, begin, part, "\n$")
        for begin in '"/'
        for part in ("a", "\\a", "\\")
    ),
    *(
        ("outrider.server.chat.tools.lark_pattern", tokenize, "", part, "$")
        for part in (" ", "\r\n ", "a", ".1", "//", "?", "a.1:", '"a"i')
    ),
    *(
        ("outrider.server.chat.tools.lark_pattern", lark_pattern, "start: ", part, "")
        for part in ("{1 ", "~ 1", '"a" ', "/a/ ", "( ")
    ),
    ("outrider.server.chat.tools.lark_pattern", escape, "", "\\", ""),
    *(("outrider.server.chat.tools.harmony", HEADER.fullmatch, HEADER_START, part, "x") for part in (" ", "\n", "a", "json ")),
    ("outrider.server.chat.tools.harmony", HEADER.fullmatch, f"{HEADER_START}<|constrain|>", " ", "x"),
    ("outrider.server.chat.tools.harmony", HEADER.fullmatch, " to=", "a<|channel|>analysis", "x"),
    *(
        ("outrider.server.chat.tools.source", each.search, "", part, "!")
        for each in (NAME, DIGITS, SPACE, SCALAR)
        for part in ("1", " ", "~")
    ),
    *(("outrider.server.chat.tools.source", each.search, "", "a", "") for each in (QUOTED, STRUCTURE)),
    *(("outrider.server.chat.tools.python_calls", each.search, "", "a", "") for each in (OUTSIDE, *INSIDE.values())),
    ("outrider.server.chat.tools.call_ids", HASHED.fullmatch, "", "a", "!"),
    ("outrider.server.chat.tools.lark", Lark({"<a>": 1, "<ab>": 2}).text, "", "<a", ""),
    *(("outrider.server.chat.marks", lambda text: marks.MARK.sub("", text), begin, "1", "x") for begin in ("", marks.START)),
    ("outrider.server.chat.marks", lambda text: marks.MARK.sub("", text), "", marks.START, "x"),
    ("outrider.server.anthropic.conversion", BILLING_LINE.match, "x-anthropic-billing-header:", "\n", "x"),
    ("outrider.server.anthropic.conversion", BILLING_LINE.match, "x-anthropic-billing-header:", "a", ""),
    *(("outrider.server.http.ignored", ignored.NAME.fullmatch, "a", part, "!") for part in (".", "a", ".a", "a" * 64 + ".")),
    *(
        ("outrider.server.openai.tools.custom_input", OPENING.match, begin, " ", "x")
        for begin in ("", "{", '{"input"', '{"input":')
    ),
    *(
        ("outrider.server.openai.tools.custom_input", CHARACTERS.match, "", part, "\\")
        for part in ("a", "\\u", "\\ud800", "\\\\", "\\u1")
    ),
    *(
        ("outrider.server.openai.tools.custom_input", lambda text: ESCAPE.sub("", text), "", part, "\\")
        for part in ("\\u", "\\", "a")
    ),
    ("outrider.server.openai.tools.custom_input", SURROGATES.search, "", "a", ""),
    ("outrider.server.http.auth", REQUEST_ID.fullmatch, "", "a", "!"),
    ("outrider.server.http.protocol", lambda text: HOST.fullmatch(text.encode()), "", "a", "/"),
    ("outrider.server.telemetry.logs", lambda text: CONTROLS.sub("", text), "", "\n", ""),
]
# Patterns that no client's text meets, or only as alternatives of literals.
OTHERS = {
    "outrider.server.chat.gbnf.parser": "a class of characters at a time",
    "outrider.server.chat.schemas.keywords": "names of definitions",
    "outrider.server.chat.schemas.notes": "names of properties",
    "outrider.server.chat.tools.gemma_grammar": "names of arguments",
    "outrider.server.chat.plain_text": "alternatives of the model's tokens",
    "outrider.server.chat.response_template": "the model's template",
    "outrider.server.chat.vocabulary": "the model's tokens",
    "outrider.server.chat.template.chat_template": "the model's template",
    "outrider.server.openai.output_parser": "alternatives of the model's tokens",
    "outrider.server.settings.models": "settings",
    "outrider.server.models.catalog": "settings and the operator's files",
    "outrider.server.datastore_tree": "the operator's files",
    "outrider.server.terminal.own_server": "the server's first line",
    "outrider.server.ray.command": "an argument of the command",
    "outrider.server.http.exposition": "the server's metrics",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("use", "begin", "part", "end"), [each[1:] for each in USES])
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
    root = Path(__file__).parents[2]
    found = set()
    for path in sorted(path for path in (root / "server").rglob("*.py") if "import re\n" in path.read_text()):
        names = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        if any(isinstance(node.value, ast.Name) and node.value.id == "re" and node.attr in vars(re) for node in names):
            found.add(".".join(["outrider", *path.relative_to(root).with_suffix("").parts]))
    assert found == {name for name, *_ in USES} | set(OTHERS)
