"""Gemma's values, and their grammar: like JSON, but keys are not quoted, and texts stand between special tokens."""

import json
import re
from collections.abc import Collection
from typing import Any

from outrider.server.chat.schemas.fields import Fields, fields_of
from outrider.server.chat.schemas.normal import Normal, standalone
from outrider.server.chat.schemas.notes import Note, Path
from outrider.server.chat.schemas.types import ANY, TEXT, resolved, texts_of, types_of
from outrider.server.chat.tools.lark import Lark, json_expression, length_pattern
from outrider.server.chat.tools.parts import CallWriter
from outrider.server.chat.tools.source import Malformed, Reader, Sink, Source
from outrider.server.chat.tools.tagged_calls import value_json
from outrider.server.chat.tools.tagged_grammar import ENFORCED, declared

QUOTE = '<|"|>'
CLOSING = {"{": "}", "[": "]"}


def fields_call(source: Source, writer: CallWriter, name: str) -> Reader[None]:
    """Reads the arguments of the function `name`, and writes them as JSON while they arrive. Raises Malformed."""
    if (yield from source.peek()) != "{":
        raise Malformed("arguments")
    writer.begin(name)
    opened: list[str] = []  # open brackets
    while True:
        bracket = yield from source.peek()
        if bracket in CLOSING:
            source.take(1)
            writer.arguments(bracket)
            opened.append(bracket)
            first = True
        else:
            yield from read_scalar(source, writer.arguments)
            first = False
        yield from source.skip_space()
        while (yield from source.match(CLOSING[opened[-1]])):
            writer.arguments(CLOSING[opened.pop()])
            if not opened:
                return
            yield from source.skip_space()
            first = False
        if not first:
            yield from source.expect(",")
            yield from source.skip_space()
            writer.arguments(", ")
        if opened[-1] == "{":
            yield from read_key(source, writer.arguments)


def read_key(source: Source, sink: Sink) -> Reader[None]:
    """Reads a key, perhaps quoted, and the colon. Raises Malformed."""
    pieces: list[str] = []
    if (yield from source.match(QUOTE)):
        yield from source.until((QUOTE,), pieces.append)
        yield from source.expect(QUOTE)
    elif (yield from source.until((":", "}"), pieces.append)) != ":":
        raise Malformed(":")
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    sink(json.dumps("".join(pieces).strip().strip('"'), ensure_ascii=False) + ": ")


def read_scalar(source: Source, sink: Sink) -> Reader[None]:
    """Reads a text, number or constant. Raises Malformed."""
    if (yield from source.match(QUOTE)):
        sink('"')
        if (yield from source.until((QUOTE,), lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1]))):
            source.take(len(QUOTE))
            sink('"')
        return
    if (yield from source.peek()) == '"':
        yield from source.quoted(sink)
        return
    pieces: list[str] = []
    found = yield from source.until((",", "}", "]"), pieces.append)
    raw = "".join(pieces)
    if found and not raw.strip():
        raise Malformed("value")
    sink(value_json(raw, ANY) if found else raw)


SCALARS = frozenset({"integer", "number", "boolean", "null"})
# Values nested deeper than this are not restricted.
MAX_DEPTH = 64
# A key that is not quoted. What no schema declares has a key of this kind.
PLAIN_KEY = re.compile(r"[^:{}\[\],\"'<>\s](?:[^:{}\[\],\"'<>\n]*[^:{}\[\],\"'<>\s])?")
ANY_KEY = '/[A-Za-z_][A-Za-z0-9_]*/ ":"'
EMPTY = '""'


class FieldsGrammar:
    """Expressions for the arguments of one function. Every schema becomes one rule, so rules can refer to each other."""

    def __init__(self, lark: Lark, name: str, parameters: Normal) -> None:
        self._lark, self._name, self._root, self._definitions = lark, name, parameters, parameters.definitions
        self._rules: dict[int | str, str] = {}  # rules by the schema's identity, or by the text of one that was merged
        self._kept: list[Any] = []  # schemas that were made here, so that their identities last
        self._any = ""  # the rule of any value

    def expression(self) -> str:
        found = declared(self._lark, self._name, self._root, "", QUOTE)
        return self._object(found or [Fields()], (self._name,), 0)

    def _object(self, alternatives: list[Fields], path: Path, depth: int) -> str:
        lark, choices = self._lark, dict[str, None]()
        for fields in alternatives:
            items = []
            for key, schema, required in fields:
                quoted = PLAIN_KEY.fullmatch(key) is None
                written = lark.text(f"{QUOTE}{key}{QUOTE}:" if quoted else f"{key}:")
                items.append((f"{written} {self._value(schema, (*path, key), depth + 1)}", required))
            more = "" if fields.more is False else f"{ANY_KEY} {self._value(fields.more, path, depth + 1)}"
            choices[lark.separated(items, ",", more)] = None
        return f'"{{" ({" | ".join(choice or EMPTY for choice in choices)}) "}}"'

    def _value(self, schema: Any, path: Path, depth: int) -> str:
        """The rule of a value that follows `schema`; of any value if the schema says nothing that can be expressed."""
        schema = resolved(schema, self._definitions)
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return self._any_value()
        key = json.dumps(schema) if schema.keys() == {"allOf"} else id(schema)
        if key not in self._rules:
            self._kept.append(schema)
            self._rules[key] = self._lark.reserve()
            types = types_of(schema, self._definitions)
            if isinstance(schema.get("type"), list):
                narrow = [{**schema, "type": each} for each in sorted(types)]
                choices = [self._typed(each, frozenset({each["type"]}), path, depth) for each in narrow]
            else:
                choices = [self._typed(schema, types, path, depth)]
            self._lark.define(self._rules[key], " | ".join(choices))
        return self._rules[key]

    def _typed(self, schema: dict[str, Any], types: frozenset[str], path: Path, depth: int) -> str:
        """Expression of a value of one type, or of one of several alternatives."""
        if types == TEXT:
            return self._text(schema, path)
        if types <= SCALARS:
            return json_expression(standalone(schema, self._definitions))
        if types == {"object"}:
            found = fields_of(schema, self._definitions)
            self._note(path, schema, ENFORCED if found else ())
            return self._object(found or [Fields()], path, depth)
        if types == {"array"}:
            self._note(path, schema, ("items", "minItems", "maxItems"))
            item = self._value(schema.get("items", True) if "prefixItems" not in schema else True, (*path, "items"), depth + 1)
            return array(item, schema.get("minItems"), schema.get("maxItems"))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._note(path, schema, {keyword} & ENFORCED)
                return (
                    "(" + " | ".join(self._value(each, path, depth + 1) for each in schema[keyword] if each is not False) + ")"
                )
        self._note(path, schema, ())
        return self._any_value()

    def _text(self, schema: dict[str, Any], path: Path) -> str:
        lark, texts = self._lark, texts_of(schema, self._definitions)
        unenforced = list(texts.unenforced)
        if texts.values and not any(QUOTE in text for text in texts.values):
            written = "(" + " | ".join(lark.text(QUOTE + text + QUOTE) for text in texts.values) + ")"
        else:
            unenforced += [] if texts.values is None else ["enum"]
            written = f"{lark.text(QUOTE)} {lark.until(QUOTE, length_pattern(texts.least, texts.most))}"
        lark.notes += [Note(path, keyword) for keyword in unenforced]
        return written

    def _note(self, path: Path, schema: dict[str, Any], enforced: Collection[str]) -> None:
        """Notes the keywords of a schema, other than its types, that are not `enforced`."""
        self._lark.notes += [Note(path, keyword) for keyword in schema if keyword not in ("type", *enforced)]

    def _any_value(self) -> str:
        if not self._any:
            self._any = each = self._lark.reserve()
            text = f"{self._lark.text(QUOTE)} {self._lark.until(QUOTE)}"
            scalar = json_expression({"type": ["number", "boolean", "null"]})
            field = f"{ANY_KEY} {each}"
            self._lark.define(each, f'{text} | {scalar} | {array(each, None, None)} | "{{" ({field} ("," {field})*)? "}}"')
        return self._any


def array(item: str, low: int | None, high: int | None) -> str:
    """Expression of an array of `low` to `high` items."""
    least = low or 0
    most = "" if high is None else max(high - 1, 0)
    if high == 0:
        return '"[" "]"'
    items = f'{item} ("," {item}){{{max(least - 1, 0)},{most}}}'
    return f'"[" {items} "]"' if least > 0 else f'"[" ({items})? "]"'
