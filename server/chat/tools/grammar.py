"""Grammars that enforce tool calls in any format. An answer that follows one parses back to calls that follow the schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.server.chat.tools.formats import FORMATS, ToolFormat, Words, is_slot
from outrider.server.chat.tools.gemma_grammar import FieldsGrammar
from outrider.server.chat.tools.lark import Lark, json_expression, length_pattern
from outrider.server.chat.tools.schemas import DEFINITIONS, TEXT, arguments, resolved, standalone, texts_of, types_of

# An answer has at most this many calls if calls are enforced.
MAX_CALLS = 8
MAX_CHARACTERS = 1 << 20
# Models write white space between calls, and after the last one.
SPACE = "/[ \\n]{1,4}/"


def calls_grammar(
    format: str | ToolFormat, functions: Mapping[str, Any], max_calls: int, special: Mapping[str, int], bare: bool = False
) -> str:
    """Lark grammar of one to `max_calls` calls of `functions` (schemas of the parameters by name) in a model's format.

    It may end after each call, so that a model need not call again. With `bare`, it also has a call as an object without
    markers. `special` are the ids of the tokens that a grammar matches by id. Raises ValueError if a schema of parameters is
    malformed.
    """
    chosen = FORMATS[format] if isinstance(format, str) else format
    lark = Lark(special)
    calls = [lark.rule(call_expression(lark, chosen, name, schema)) for name, schema in functions.items()]
    call = lark.rule(" | ".join(calls))
    repeated = 0 if chosen.single else max_calls - 1
    before, after = chosen.enclosure
    between = lark.text(chosen.between) if chosen.between.strip() else f"{SPACE}?"
    more = f"({between} {call}){{0,{repeated}}}" if repeated else ""
    end = f"({SPACE}? {lark.text(after)})?" if after else ""
    start = f"start: {lark.text(before)} {call} {more} {end} {SPACE}?"
    if bare:
        hermes = FORMATS["hermes"]
        objects = [json_expression(object_schema(hermes, name, schema)) for name, schema in functions.items()]
        start += f" | ({' | '.join(objects)}) {SPACE}?"
    grammar = "\n".join([start, *lark.rules])
    if len(grammar) > MAX_CHARACTERS:
        raise ValueError("the schemas repeat their definitions too often; send fewer tools or shorter definitions.")
    return grammar


def call_expression(lark: Lark, format: ToolFormat, name: str, parameters: Any) -> str:
    """Expression of one call of the function `name`."""
    slots: dict[str, Callable[[], str]] = {
        "%object": lambda: json_expression(object_schema(format, name, parameters)),
        "%arguments": lambda: json_expression(parameters),
        "%parameters": lambda: parameters_expression(lark, format.parameter, name, parameters),
        "%python": lambda: f'{lark.text(f"{name}(")} {keywords_expression(lark, name, parameters)} ")"',
        "%fields": lambda: FieldsGrammar(lark, name, parameters).expression(),
        "%number": lambda: f"/[0-{MAX_CALLS - 1}]/",
        "%call_id": str,
        "%name": lambda: lark.text(name),
    }
    return expression(lark, format.call, slots)


def expression(lark: Lark, words: Words, slots: Mapping[str, Callable[[], str]]) -> str:
    """Expression of literal words and slots."""
    parts, literal = [], ""
    for word in words:
        if is_slot(word):
            parts += [lark.text(literal), slots[word]()]
            literal = ""
        else:
            literal += word
    return " ".join(part for part in (*parts, lark.text(literal)) if part)


def object_schema(format: ToolFormat, name: str, parameters: Any) -> dict[str, Any]:
    """Schema of a call as a JSON object."""
    return {
        "type": "object",
        "properties": {
            format.name_key: {"const": name},
            format.key: {key: value for key, value in parameters.items() if key not in DEFINITIONS},
        },
        "required": [format.name_key, format.key],
        "additionalProperties": False,
        **{key: parameters[key] for key in DEFINITIONS if key in parameters},  # references are resolved from the root
    }


def keywords_expression(lark: Lark, name: str, parameters: Any) -> str:
    """Expression of the keyword arguments of a Python call."""
    items = [
        (f"{lark.text(f'{argument}=')} {json_expression(standalone(schema, parameters))}", required)
        for argument, schema, required in arguments(name, parameters)
    ]
    return lark.separated(items, ", ")


def parameters_expression(lark: Lark, words: Words, name: str, parameters: Any) -> str:
    """Expression of arguments between tags."""
    at = words.index("%value")
    end = next(word for word in words[at + 1 :] if word.strip())
    after_end = "".join(words[words.index(end, at) + 1 :])
    parts = []
    for argument, schema, required in arguments(name, parameters):
        if any(word in argument for word in (end, "<", ">", '"', "\n")):
            raise ValueError(f"the argument {argument!r} of {name!r} cannot be written in the model's format; rename it.")
        value = text_expression(lark, schema, parameters, end, "" if words[at - 1].strip() else words[at - 1])
        is_text = "false" if value is None else "true"
        before = lark.text("".join(words[:at]).replace("%text", is_text).replace("%key", argument))
        if value is None:
            value = f"{json_expression(standalone(schema, parameters))} {lark.text(''.join(words[at + 1 :]))}"
        else:
            value = f"{value} {lark.text(after_end)}"
        parts.append(f"{before} {value}" if required else f"({before} {value})?")
    return " ".join(parts)


def text_expression(lark: Lark, schema: Any, root: Any, end: str, newline: str) -> str | None:
    """Expression of a text and the tag `end` after it; None if the value is not always a text.

    Of the schema, `enum`, `const`, `minLength` and `maxLength` are enforced.
    """
    if types_of(schema, root) != TEXT:
        return None
    schema = resolved(schema, root)
    values = texts_of(schema)
    if values is not None:
        if any(end in value for value in values):
            raise ValueError(f"a value of an enumeration contains {end!r}.")
        choices = " | ".join(lark.text(value) or '""' for value in values)
        return f"({choices}) {lark.text(f'{newline}{end}')}"
    return lark.until(end, length_pattern(schema.get("minLength"), schema.get("maxLength"), not newline))
