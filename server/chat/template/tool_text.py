"""Tools, calls and results as text, for chat templates that do not render them, and structures, which none renders.

Promises that the model's parser reads the calls that are written here.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outrider.server.chat.tools import FORMATS, ToolFormat
from outrider.server.chat.tools.formats import Words
from outrider.server.chat.tools.gemma import QUOTE

Message = dict[str, Any]
Call = tuple[str, Mapping[str, Any]]  # the function's name, and the arguments
RESULT = ("<tool_response>\n", "\n</tool_response>")
TYPES = ("string", "number", "integer", "boolean", "array", "object")
EXAMPLE: Call = ("function_name", {"argument_name": "value"})


def tools_text(tools: Sequence[Mapping[str, Any]], format: ToolFormat, results_are_text: bool) -> str:
    """The part of a system message that describes the tools and how to call them."""
    functions = "\n".join(as_json(tool.get("function", tool)) for tool in tools)
    response = f" The result comes between {RESULT[0].strip()} and {RESULT[1].strip()}." if results_are_text else ""
    return (
        f"You can call these functions, each described by a JSON object:\n<tools>\n{functions}\n</tools>\n"
        f"To call a function, write its name and its arguments in this form:\n{calls_text([EXAMPLE], format)}\n"
        f"Write several calls one after the other.{response} If no function helps, answer without a call."
    )


def with_structures(messages: list[Message], structures: Iterable[str]) -> list[Message]:
    """The messages of a request that has tools, too, with structures described after its first system messages.

    A model that does not know the structure calls again instead of writing it.
    """
    head = next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))
    described = [
        {"role": "system", "content": f"Your final answer, after the function calls, is {each}"} for each in structures
    ]
    return [*messages[:head], *described, *messages[head:]]


def complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with the fields that it leaves out and some chat templates read, and one type where it has several."""
    function = {"description": "", "parameters": {}, **with_one_type(tool["function"])}
    parameters = {"type": "object", "properties": {}, "required": [], **function["parameters"]}
    properties = {
        name: {"type": "string", "description": "", **schema} if isinstance(schema, Mapping) else schema
        for name, schema in parameters["properties"].items()
    }
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties}}}


def with_one_type(schema: Any) -> Any:
    """A schema whose types are the first that templates know: they write others letter by letter, without end."""
    if isinstance(schema, list):
        return list(map(with_one_type, schema))
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: with_one_type(value) for key, value in schema.items()}
    given = inner.get("type")
    if isinstance(given, str | list):
        types = [given] if isinstance(given, str) else given
        inner["type"] = next((each for each in types if each in TYPES), "string")
    return inner


def result_text(content: Any) -> Any:
    """The content of a user's message that tells the result of a call."""
    if isinstance(content, list):
        return [{"type": "text", "text": RESULT[0]}, *content, {"type": "text", "text": RESULT[1]}]
    return f"{RESULT[0]}{content}{RESULT[1]}"


def calls_text(calls: Sequence[Call], format: ToolFormat) -> str:
    """Calls as the model writes them."""
    if format.name == "harmony":  # its calls are messages of their own
        format = FORMATS["hermes"]
    before, after = format.enclosure
    written = [call_text(name, arguments, number, format) for number, (name, arguments) in enumerate(calls)]
    return before + (format.between.join(written) if format.between else "".join(written)) + after


def call_text(name: str, arguments: Mapping[str, Any], number: int, format: ToolFormat) -> str:
    """The call `number` of a message."""
    slots: dict[str, Callable[[], str]] = {
        "%object": lambda: as_json({"name": name, format.key: arguments}),
        "%name": lambda: name,
        "%arguments": lambda: as_json(arguments),
        "%parameters": lambda: "".join(parameter_text(format.parameter, *each) for each in arguments.items()),
        "%python": lambda: f"{name}({', '.join(f'{key}={as_json(value)}' for key, value in arguments.items())})",
        "%fields": lambda: gemma_text(arguments),
        "%number": lambda: str(number),
        "%call_id": str,
    }
    return "".join(slots[word]() if word in slots else word for word in format.call)


def parameter_text(words: Words, key: str, value: Any) -> str:
    """An argument between tags."""
    is_text = isinstance(value, str)
    slots = {"%key": key, "%value": value if is_text else as_json(value), "%text": "true" if is_text else "false"}
    return "".join(slots.get(word, word) for word in words)


def gemma_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{gemma_text(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_text, value))}]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else as_json(value)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
