"""Calls whose arguments stand between tags, one by one. A tool's schema tells text from numbers and other values."""

import json
from typing import Any

from outrider.server.chat.schemas.fields import ArgumentTypes
from outrider.server.chat.schemas.normal import of_objects
from outrider.server.chat.schemas.types import TEXT, types_of_value
from outrider.server.chat.tools.formats import Words
from outrider.server.chat.tools.parts import CallWriter
from outrider.server.chat.tools.source import Malformed, Reader, Source
from outrider.server.http import json_body

PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def tagged_call(source: Source, writer: CallWriter, name: str, schema: Any, parameter: Words, closing: str) -> Reader[None]:
    """Reads the arguments of the function `name`, up to `closing`, and writes them as JSON. Raises Malformed."""
    key_at, value_at = parameter.index("%key"), parameter.index("%value")
    wrapped = not parameter[value_at - 1].strip()
    key_end, *between = (word for word in parameter[key_at + 1 : value_at] if word.strip())
    value_end = next(word for word in parameter[value_at + 1 :] if word.strip())
    known, separator = ArgumentTypes(of_objects(schema)), "{"
    yield from source.skip_space()
    while (yield from source.match(parameter[0])):
        pieces: list[str] = []
        yield from source.until((key_end,), pieces.append)
        yield from source.expect(key_end)
        is_text = False
        for word in between:
            yield from source.skip_space()
            if word == "%text":
                is_text = (yield from source.word()) == "true"
            else:
                yield from source.expect(word)
        if separator == "{":
            writer.begin(name)
        key = "".join(pieces)
        writer.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        types = known[key]
        if is_text:
            # A schema that allows no text overrides the mark.
            types = types & TEXT or types
        value = read_text if types == TEXT else read_value
        yield from value(source, writer, types, value_end, wrapped)
        yield from source.expect(value_end)
        yield from source.skip_space()
    if not (yield from source.starts(closing)):
        raise Malformed(closing)
    if separator == "{":
        writer.begin(name)
    writer.arguments("{}" if separator == "{" else "}")


def read_text(source: Source, writer: CallWriter, types: frozenset[str], end: str, wrapped: bool) -> Reader[None]:
    """Reads text before `end`, and writes it as a JSON string while it arrives."""
    newline = ""  # line break at the end of the text so far; it is not part of wrapped text

    def write(text: str) -> None:
        nonlocal newline
        if text:
            text = newline + text
            newline = "\n" if wrapped and text.endswith("\n") else ""
            writer.arguments(json.dumps(text.removesuffix(newline), ensure_ascii=False)[1:-1])

    writer.arguments('"')
    if wrapped:
        yield from source.match("\n")
    if (yield from source.until((end,), write)):
        writer.arguments('"')


def read_value(source: Source, writer: CallWriter, types: frozenset[str], end: str, wrapped: bool) -> Reader[None]:
    """Reads a value before `end`, and writes it as JSON of one of `types` if it can be read so, else as text."""
    pieces: list[str] = []
    found = yield from source.until((end,), pieces.append)
    raw = "".join(pieces)
    if wrapped:
        raw = raw.removeprefix("\n").removesuffix("\n")
    writer.arguments(value_json(raw, types) if found else raw)


def value_json(raw: str, types: frozenset[str]) -> str:
    """JSON for what a model wrote as a value of one of `types`."""
    text = raw.strip()
    text = PYTHON_CONSTANTS.get(text, text)
    try:
        value = json_body.decode(text)
    except json_body.InvalidJSON:
        return json.dumps(raw, ensure_ascii=False)
    return text if types_of_value(value) & types else json.dumps(raw, ensure_ascii=False)
