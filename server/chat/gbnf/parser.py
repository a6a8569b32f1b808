"""Reads GBNF as llama.cpp's parser does, and underscores in names too. Takes time linear in the size of the grammar."""

import re
from collections.abc import Mapping

from outrider.server.chat.gbnf.nodes import (
    LAST_CHARACTER,
    MAX_DEPTH,
    SURROGATES,
    Characters,
    Node,
    Ranges,
    Reference,
    Repeat,
    Series,
    Token,
    choice,
    normal,
    series,
)

ROOT = "root"
COMMENTS = re.compile(r"(?:[ \t\r\n]|(?:#|//)[^\r\n]*)*+")
DEFINITION = re.compile(r"([\w-]+)(?:[ \t]|#[^\r\n]*)*+::=")
SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*+")
LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*+")
ITEM = re.compile(
    r"""(?P<name>[\w-]+)|(?P<quote>")|\[(?P<class>\^?)|(?P<not>!?)<(?:\[(?P<id>\d{1,10})\]|(?P<token>[^<>\r\n\[][^>\r\n]*))>
      |(?P<any>\.)|(?P<open>\()|(?P<close>\))|(?P<or>\|)|(?P<times>[*+?])
      |\{\s*(?P<low>\d{1,9})\s*(?P<comma>,\s*(?P<high>\d{1,9})?\s*)?\}""",
    re.VERBOSE,
)
ESCAPE = re.compile(r"""\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\"\[\]-]))""")
CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is in llama.cpp's GBNF rather than in Lark: its first rule's name is followed by `::=`."""
    start = COMMENTS.match(grammar)
    return start is not None and DEFINITION.match(grammar, start.end()) is not None


class Parser:
    def __init__(self, grammar: str, tokens: Mapping[str, int]) -> None:
        """`tokens`: ids by text of the tokens that may be named."""
        self._text, self._tokens = grammar, tokens
        self._at = 0
        self._rule = ""

    def parse(self) -> dict[str, Node]:
        """The rules' bodies by name. Raises ValueError."""
        rules: dict[str, Node] = {}
        used: dict[str, tuple[str, int]] = {}  # in which rule, and where, each is first referred to
        self._skip(LINES)
        while self._at < len(self._text):
            definition = DEFINITION.match(self._text, self._at)
            if definition is None:
                self._rule = ""
                raise self._error('a rule is expected here, as in: name ::= "text"')
            self._rule, self._at = definition[1], definition.end()
            self._skip(LINES)
            rules[self._rule] = self._body(used)
            self._skip(LINES)
        if ROOT not in rules:
            raise ValueError(f"it has no rule named {ROOT!r}, with which a grammar starts")
        for name, (self._rule, at) in used.items():
            if name not in rules:
                raise self._error(f"there is no rule named {name!r}", at)
        return rules

    def _body(self, used: dict[str, tuple[str, int]]) -> Node:
        """Reads the alternatives of a rule, to the end of its line."""
        items: list[Node] = []
        alternatives: list[Node] = []
        groups: list[tuple[list[Node], list[Node], int]] = []  # the open groups' outer alternatives, items and places
        while found := ITEM.match(self._text, self._at):
            start = self._at
            if found["close"] and not groups:
                raise self._error("this parenthesis was never opened")
            self._at = found.end()
            if found["or"]:
                alternatives.append(series(items))
                items = []
            elif found["open"]:
                groups.append((alternatives, items, start))
                alternatives, items = [], []
            elif found["close"]:
                group = choice([*alternatives, series(items)])
                alternatives, items, _ = groups.pop()
                items.append(self._checked(group, start))
            elif found["times"] or found["low"]:
                self._repeat(found, items, start)
            else:
                items.append(self._item(found, used, start))
            self._skip(LINES if groups or found["or"] else SPACE)
        ended = self._at == len(self._text)
        if groups and (ended or self._text.startswith("::=", self._at)):
            raise self._error("this parenthesis is never closed", groups[-1][2])
        if not ended and self._text[self._at] not in "\r\n":
            raise self._error("this is no part of a rule")
        return choice([*alternatives, series(items)])

    def _item(self, found: re.Match[str], used: dict[str, tuple[str, int]], start: int) -> Node:
        if name := found["name"]:
            used.setdefault(name, (self._rule, start))
            return Reference(name)
        if found["any"]:
            return Characters(normal([], negated=True))
        if found["quote"]:
            return self._literal(start)
        if found["class"] is not None:
            return self._class(negated=bool(found["class"]), start=start)
        return self._token(found, start)

    def _token(self, found: re.Match[str], start: int) -> Token:
        id = found["id"] or self._tokens.get(f"<{found['token']}>")
        if id is None:
            raise self._error(f"<{found['token']}> is no special token of the model; write a token's id, as in <[1000]>", start)
        return Token(f"<[{'^' if found['not'] else ''}{int(id)}]>")

    def _repeat(self, found: re.Match[str], items: list[Node], start: int) -> None:
        if not items:
            raise self._error("there is nothing to repeat", start)
        low, high = TIMES[found["times"]] if found["times"] else (int(found["low"]), None)
        if found["low"] and not (found["comma"] and not found["high"]):
            high = int(found["high"] or found["low"])
        if high is not None and high < low:
            raise self._error("the second number of repetitions is less than the first", start)
        items[-1] = Series() if high == 0 else self._checked(Repeat(items[-1], low, high), start)

    def _checked(self, node: Node, start: int) -> Node:
        if node.depth > MAX_DEPTH:
            raise self._error("it is nested too deep; flatten it", start)
        return node

    def _literal(self, start: int) -> Node:
        characters: list[Node] = []
        while not self._text.startswith('"', self._at):
            at = self._at
            character = self._character("text", start)
            if SURROGATES[0] <= character <= SURROGATES[1]:
                raise self._error("UTF-8 has no such character", at)
            characters.append(Characters([(character, character)]))
        self._at += 1
        return series(characters)

    def _class(self, negated: bool, start: int) -> Node:
        ranges: Ranges = []
        while not self._text.startswith("]", self._at):
            at = self._at
            low = high = self._character("class", start)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character("class", start)
            if high < low:
                raise self._error("the range's second character comes before its first", at)
            ranges.append((low, high))
        self._at += 1
        if not ranges:  # llama.cpp's empty class matches the empty text
            return Series()
        if not (characters := normal(ranges, negated)):
            raise self._error("no character is in this class", start)
        return Characters(characters)

    def _character(self, what: str, start: int) -> int:
        """Reads a character of a text or class that begins at `start`."""
        if self._at == len(self._text):
            raise self._error(f"this {what} is never closed", start)
        at, character = self._at, self._text[self._at]
        if character != "\\":
            self._at += 1
            return ord(character)
        escape = ESCAPE.match(self._text, at)
        if escape is None:
            raise self._error(f"there is no escape {self._text[at : at + 2]!r} of this form", at)
        self._at = escape.end()
        if simple := escape[4]:
            return ord(CONTROLS.get(simple, simple))
        code = int(escape[1] or escape[2] or escape[3], 16)
        if code > LAST_CHARACTER:
            raise self._error("Unicode has no such character", at)
        return code

    def _skip(self, space: re.Pattern[str]) -> None:
        if found := space.match(self._text, self._at):
            self._at = found.end()

    def _place(self, at: int) -> str:
        start = self._text.rfind("\n", 0, at) + 1
        rule = f"rule {self._rule!r}, " if self._rule else ""
        return f"{rule}line {self._text.count(chr(10), 0, at) + 1}, column {at - start + 1}"

    def _error(self, what: str, at: int | None = None) -> ValueError:
        return ValueError(f"{self._place(self._at if at is None else at)}: {what}")
