"""Grammars that enforce tool calls in any format. An answer that follows one parses back to calls that follow the schemas."""

from collections.abc import Callable, Mapping
from typing import Any

from outrider.server.chat.schemas.fields import Fields
from outrider.server.chat.schemas.normal import Normal, of_objects, standalone
from outrider.server.chat.schemas.notes import Note
from outrider.server.chat.tools.formats import FORMATS, ToolFormat, Words, is_slot
from outrider.server.chat.tools.gemma import FieldsGrammar
from outrider.server.chat.tools.lark import Lark, json_expression
from outrider.server.chat.tools.tagged_grammar import TaggedGrammar, declared

# An answer has at most this many calls if calls are enforced.
MAX_CALLS = 8
MAX_CHARACTERS = 1 << 20
# Models write white space between calls, and after the last one.
SPACE = "/[ \\n]{1,4}/"
# No keyword of a Python call has these characters. What no schema declares is an identifier.
IN_KEYWORDS = "=\"'()[]{},*#\\\n"
KEYWORD = '/[A-Za-z_][A-Za-z0-9_]{0,63}/ "="'


def calls_grammar(
    format: str,
    functions: Mapping[str, Any],
    max_calls: int,
    special: Mapping[str, int],
    notes: list[Note] | None = None,
    bare: bool = False,
) -> str:
    """Lark grammar of one to `max_calls` calls of `functions` (schemas of the parameters by name) in a model's format.

    It may end after each call, so that a model need not call again. With `bare`, it also has a call as an object without
    markers. `special` are the ids of the tokens that a grammar matches by id. `notes` gets what the format cannot enforce. A
    schema may be normalised. Raises ValueError if the grammar is too large.
    """
    chosen = FORMATS[format]
    lark = Lark(special, notes)
    normals = {name: each if isinstance(each, Normal) else of_objects(each) for name, each in functions.items()}
    calls = [lark.rule(call_expression(lark, chosen, name, normal)) for name, normal in normals.items()]
    call = lark.rule(" | ".join(calls))
    repeated = 0 if chosen.single else max_calls - 1
    before, after = chosen.enclosure
    between = lark.text(chosen.between) if chosen.between.strip() else f"{SPACE}?"
    more = f"({between} {call}){{0,{repeated}}}" if repeated else ""
    end = f"({SPACE}? {lark.text(after)})?" if after else ""
    start = f"start: {lark.text(before)} {call} {more} {end} {SPACE}?"
    if bare:
        hermes = FORMATS["hermes"]
        objects = [json_expression(object_schema(hermes, name, normal)) for name, normal in normals.items()]
        start += f" | ({' | '.join(objects)}) {SPACE}?"
    grammar = "\n".join([start, *lark.rules])
    if len(grammar) > MAX_CHARACTERS:
        raise ValueError("the schemas repeat their definitions too often; send fewer tools or shorter definitions.")
    return grammar


def call_expression(lark: Lark, format: ToolFormat, name: str, parameters: Normal) -> str:
    """Expression of one call of the function `name`."""
    slots: dict[str, Callable[[], str]] = {
        "%object": lambda: json_expression(object_schema(format, name, parameters)),
        "%arguments": lambda: json_expression(parameters.standalone),
        "%parameters": lambda: TaggedGrammar(lark, format.parameter, name, parameters).expression(),
        "%python": lambda: f'{lark.text(f"{name}(")} {keywords_expression(lark, name, parameters)} ")"',
        "%fields": lambda: FieldsGrammar(lark, name, parameters).expression(),
        "%number": lambda: f"/[0-{MAX_CALLS - 1}]/",
        "%call_id": str,
        "%name": lambda: lark.text(name),
    }
    return expression(lark, format.call, slots)


def expression(lark: Lark, words: Words, slots: Mapping[str, Callable[[], str]]) -> str:
    parts, literal = [], ""
    for word in words:
        if is_slot(word):
            parts += [lark.text(literal), slots[word]()]
            literal = ""
        else:
            literal += word
    return " ".join(part for part in (*parts, lark.text(literal)) if part)


def object_schema(format: ToolFormat, name: str, parameters: Normal) -> dict[str, Any]:
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, format.key: parameters.schema},
        "required": ["name", format.key],
        "additionalProperties": False,
    }
    return standalone(call, parameters.definitions)  # references are resolved from the root


def keywords_expression(lark: Lark, name: str, parameters: Normal) -> str:
    """Expression of the keyword arguments of a Python call."""
    alternatives = declared(lark, name, parameters, IN_KEYWORDS, "  ")
    choices: dict[str, None] = {}
    for fields in alternatives or [Fields()]:
        items = [
            (f"{lark.text(f'{argument}=')} {json_expression(standalone(schema, parameters.definitions))}", required)
            for argument, schema, required in fields
        ]
        more = "" if fields.more is False else f"{KEYWORD} {json_expression(standalone(fields.more, parameters.definitions))}"
        choices[lark.separated(items, ", ", more)] = None
    return "(" + " | ".join(choice or '""' for choice in choices) + ")"
