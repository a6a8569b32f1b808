"""Gemma's values: like JSON, but keys are not quoted, and texts stand between special tokens."""

from __future__ import annotations

import json

from outrider.server.chat.schemas.types import ANY
from outrider.server.chat.tools.parts import CallWriter
from outrider.server.chat.tools.source import Malformed, Reader, Sink, Source
from outrider.server.chat.tools.tagged_calls import value_json

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
