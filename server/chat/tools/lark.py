"""Pieces of llguidance's Lark grammars. A special token cannot be matched as text, so it is matched by its id."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.server.chat.schemas.notes import Note

# An answer has at most this many values that a schema does not declare, in a row.
MAX_UNDECLARED = 16
# Allows one spelling per value: with flexible whitespace, a small model could insert spaces up to the token limit.
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """A grammar that is being written: expressions for texts, and the rules that they need."""

    def __init__(self, special: Mapping[str, int], notes: list[Note] | None = None) -> None:
        """`special` are the ids of the tokens that a grammar matches by id. `notes`: a list for what it does not enforce."""
        self._special = special
        self.notes: list[Note] = [] if notes is None else notes
        self.rules: list[str] = []

    def rule(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def reserve(self) -> str:
        """The name of a new rule that `define` defines, so that it can refer to itself."""
        return self.rule("")

    def define(self, name: str, expression: str) -> str:
        """Defines a reserved rule; returns its name."""
        self.rules[int(name[1:])] += expression
        return name

    def text(self, text: str) -> str:
        """An expression for exactly this text; empty for no text."""
        tokens = sorted((token for token in self._special if token and token in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in tokens else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def until(self, end: str, pattern: str = "(?s:.*)") -> str:
        """An expression for any text that matches the regex and then the first `end`."""
        at = min((found for token in self._special if token and (found := end.find(token)) >= 0), default=-1)
        if at >= 0:  # the special token ends the text, which cannot contain it
            before = re.escape(end[:at]).replace("/", r"\/")
            return f"/{pattern}{before}/ {self.text(end[at:])}"
        return self.rule(f"/{pattern}/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def separated(self, items: Sequence[tuple[str, bool]], separator: str, more: str = "") -> str:
        """An expression for items, each with whether it is required, in this order. Required ones come first.

        `more`: an expression for each item that may follow them.
        """
        comma = self.text(separator)
        tail = f"({comma} {more}){{0,{MAX_UNDECLARED}}}" if more else ""
        parts = f" {comma} ".join(item for item, required in items if required)
        optional = [item for item, required in items if not required]
        if parts or not (optional or more):
            return " ".join((parts, *(f"({comma} {item})?" for item in optional), tail))
        rest, first = (self.rule(tail), self.rule(f"{more} {tail}")) if more else ("", "")
        for item in reversed(optional):
            first = self.rule(f"{item} {rest}" + (f" | {first}" if first else ""))
            rest = self.rule(f"({comma} {item})? {rest}")
        return f"({first})?"


def length_pattern(least: int, most: int | None, open_end: bool = True) -> str:
    """A regex for texts of a length, in characters. Without `open_end`, a text that may not be empty ends with no newline."""
    most = None if most is None or most < least else most
    if not least and most is None:
        return "(?s:.*)"
    if open_end or not least:
        return f"(?s:.{{{least},{'' if most is None else most}}})"
    return f"(?s:.{{{least - 1},{'' if most is None else most - 1}}})[^\\n]"


def json_expression(schema: Any) -> str:
    return f"%json {json.dumps({'x-guidance': COMPACT, **schema})}"
