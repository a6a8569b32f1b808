"""Grammar of Gemma's values, from JSON schemas."""

from __future__ import annotations

from typing import Any

from outrider.server.chat.tools.gemma import QUOTE
from outrider.server.chat.tools.lark import Lark, json_expression, length_pattern
from outrider.server.chat.tools.schemas import TEXT, arguments, properties_of, resolved, standalone, texts_of, types_of

SCALARS = frozenset({"integer", "number", "boolean", "null"})
# Values nested deeper than this are not restricted.
MAX_DEPTH = 64


class FieldsGrammar:
    """Expressions for the arguments of one function. Every schema becomes one rule, so rules can refer to each other."""

    def __init__(self, lark: Lark, name: str, parameters: Any) -> None:
        self._lark, self._name, self._root = lark, name, parameters
        self._rules: dict[int, str] = {}  # rules by the schema's identity
        self._any = ""  # the rule of any value

    def expression(self) -> str:
        """Expression of the arguments. Raises ValueError if the schema of the parameters is malformed."""
        return self._object(self._root, 0)

    def _object(self, schema: Any, depth: int) -> str:
        items = []
        for key, inner, required in arguments(self._name, schema):
            if any(character in key for character in ":{}[],"):
                raise ValueError(f"the argument {key!r} of {self._name!r} cannot be written in the model's format; rename it.")
            items.append((f"{self._lark.text(f'{key}:')} {self._value(inner, depth + 1)}", required))
        return f'"{{" {self._lark.separated(items, ",")} "}}"'

    def _value(self, schema: Any, depth: int) -> str:
        """The rule of a value that follows `schema`; of any value if the schema says nothing that can be expressed."""
        schema = resolved(schema, self._root)
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return self._any_value()
        if id(schema) not in self._rules:
            self._rules[id(schema)] = self._lark.reserve()
            types = types_of(schema, self._root)
            if isinstance(schema.get("type"), list):
                choices = [self._typed({**schema, "type": each}, frozenset({each}), depth) for each in sorted(types)]
            else:
                choices = [self._typed(schema, types, depth)]
            self._lark.define(self._rules[id(schema)], " | ".join(choices))
        return self._rules[id(schema)]

    def _typed(self, schema: dict[str, Any], types: frozenset[str], depth: int) -> str:
        """Expression of a value of one type, or of one of several alternatives."""
        lark, texts = self._lark, texts_of(schema)
        if types == TEXT and texts is not None:
            return "(" + " | ".join(lark.text(QUOTE + text + QUOTE) for text in texts) + ")"
        if types == TEXT:
            pattern = length_pattern(schema.get("minLength"), schema.get("maxLength"))
            return f"{lark.text(QUOTE)} {lark.until(QUOTE, pattern)}"
        if types <= SCALARS:
            return json_expression(standalone(schema, self._root))
        if types == {"object"} and properties_of(schema):
            return self._object(schema, depth)
        if types == {"array"} and isinstance(schema.get("items"), dict):
            return array(self._value(schema["items"], depth + 1), schema.get("minItems"), schema.get("maxItems"))
        for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
            if isinstance(alternatives, list) and alternatives:
                return "(" + " | ".join(self._value(each, depth + 1) for each in alternatives) + ")"
        return self._any_value()

    def _any_value(self) -> str:
        """The rule of any value."""
        if not self._any:
            self._any = each = self._lark.reserve()
            text = f"{self._lark.text(QUOTE)} {self._lark.until(QUOTE)}"
            scalar = json_expression({"type": ["number", "boolean", "null"]})
            field = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {each}'
            self._lark.define(each, f'{text} | {scalar} | {array(each, None, None)} | "{{" ({field} ("," {field})*)? "}}"')
        return self._any


def array(item: str, low: Any, high: Any) -> str:
    """Expression of an array of `low` to `high` items."""
    least = low if isinstance(low, int) else 0
    most = max(high - 1, 0) if isinstance(high, int) else ""
    if high == 0:
        return '"[" "]"'
    items = f'{item} ("," {item}){{{max(least - 1, 0)},{most}}}'
    return f'"[" {items} "]"' if least > 0 else f'"[" ({items})? "]"'
