"""Calls whose arguments are JSON: an object with a name and arguments, or arguments after a name."""

import json
from collections.abc import Collection

from outrider.server.chat.tools.parts import CallWriter
from outrider.server.chat.tools.source import NAME, Malformed, Reader, Sink, Source
from outrider.server.http import json_body

FENCE = "```"


def arguments_call(source: Source, writer: CallWriter, name: str) -> Reader[None]:
    """Reads the arguments of the function `name`, a JSON object. Raises Malformed."""
    if (yield from source.peek()) != "{":
        raise Malformed("arguments")
    writer.begin(name)
    yield from source.balanced(writer.arguments)


def open_call(source: Source) -> Reader[bool]:
    """Reads the brace that opens a call. True if it is doubled, as in the example of some chat templates. Raises Malformed."""
    yield from source.expect("{")
    return (yield from source.match("{"))


def close_call(source: Source) -> Reader[None]:
    """Reads what follows the brace that closes a call with a doubled one: models write any number of braces."""
    yield from source.skip_space()
    while (yield from source.match("}")):
        yield from source.skip_space()


def object_call(source: Source, writer: CallWriter, marked: bool, arguments_key: str = "arguments") -> Reader[None]:
    """Reads an object with a name and with arguments, or "parameters", in any order; other fields are dropped.

    Without a marker, an object is a call only if it has both. Raises Malformed.
    """
    doubled = yield from open_call(source)
    name: str | None = None
    begun, early = False, list[str]()  # arguments before the name
    has_arguments = False
    while True:
        yield from source.skip_space()
        key = yield from read_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        is_arguments = key in (arguments_key, "arguments", "parameters") and not has_arguments
        if key == "name" and name is None:
            name = yield from read_string(source)
        has_arguments = has_arguments or is_arguments
        if not begun and name is not None and (has_arguments or marked):
            writer.begin(name)
            writer.arguments("".join(early))
            begun = True
        if is_arguments:
            sink: Sink = writer.arguments if begun else early.append
            yield from source.json(sink)
        elif key != "name":
            yield from source.json(lambda _: None)
        yield from source.skip_space()
        if (yield from source.match("}")):
            break
        yield from source.expect(",")
    if not begun:
        raise Malformed("a call without a name or arguments")
    if not has_arguments:
        writer.arguments("{}")
    if doubled:
        yield from close_call(source)


def bare_calls(source: Source, writer: CallWriter, functions: Collection[str], keys: Collection[str]) -> Reader[None]:
    """Reads objects with the name of one of `functions`, its arguments under one of `keys`, and nothing else.

    Models that do not write their format's markers write such objects, perhaps in a code fence. Raises Malformed.
    """
    fenced = yield from source.match(FENCE)
    if fenced:
        yield from source.run(NAME, lambda _: None)  # the fence's language
        yield from source.skip_space()
    while True:
        name, arguments = yield from exact_object(source, functions, keys)
        writer.begin(name)
        writer.arguments(arguments)
        source.hold()
        yield from source.skip_space()
        if fenced and (yield from source.match(FENCE)):
            source.hold()
            yield from source.skip_space()
            fenced = yield from source.match(FENCE)
            yield from source.run(NAME, lambda _: None)
            yield from source.skip_space()
        if (yield from source.peek()) != "{":
            return


def last_calls(source: Source, writer: CallWriter, functions: Collection[str], keys: Collection[str]) -> Reader[None]:
    """Reads such objects after a line break, each perhaps in a code fence, if nothing follows them. Raises Malformed."""
    calls: list[tuple[str, str]] = []
    yield from source.skip_space()
    while (yield from source.peek()):
        fenced = yield from source.match(FENCE)
        if fenced:
            yield from source.run(NAME, lambda _: None)
            yield from source.skip_space()
        calls.append((yield from exact_object(source, functions, keys)))
        yield from source.skip_space()
        if fenced:
            yield from source.match(FENCE)
            yield from source.skip_space()
    for name, arguments in calls:
        writer.begin(name)
        writer.arguments(arguments)


def exact_object(source: Source, functions: Collection[str], keys: Collection[str]) -> Reader[tuple[str, str]]:
    """Reads an object of two fields, in any order: a function's name, and its arguments as JSON. Raises Malformed."""
    doubled = yield from open_call(source)
    name, arguments = "", ""
    for end in (",", "}"):
        yield from source.skip_space()
        key = yield from source.one_of(
            [json.dumps(key) for key in (*(() if name else ("name",)), *(() if arguments else keys))]
        )
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key == '"name"':
            name = json.loads((yield from source.one_of([json.dumps(each) for each in functions])))
        else:
            arguments = yield from read_object(source)
        yield from source.skip_space()
        yield from source.expect(end)
    if doubled:
        yield from close_call(source)
    return name, arguments


def read_object(source: Source) -> Reader[str]:
    """Reads a JSON object. Raises Malformed."""
    if (yield from source.peek()) != "{":
        raise Malformed("object")
    pieces: list[str] = []
    yield from source.balanced(pieces.append)
    text = "".join(pieces)
    try:
        json_body.decode(text)
    except json_body.InvalidJSON:
        raise Malformed("object") from None
    return text


def read_string(source: Source) -> Reader[str]:
    """Reads a JSON string. Raises Malformed."""
    raw: list[str] = []
    yield from source.quoted(raw.append)
    try:
        return str(json_body.decode("".join(raw)))
    except json_body.InvalidJSON:
        raise Malformed("string") from None
