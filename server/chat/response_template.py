"""Formats of tool calls and reasoning, derived from a tokenizer's `response_template`.

A response template is transformers' description of a model's answers: the markers around the fields of a message, as texts or
regexes, and how their contents become values. Promises a format only for what the parsers and grammars can express.
"""

from __future__ import annotations

import json
import re
from typing import Any

from outrider.server.chat.reasoning_parser import ReasoningFormat
from outrider.server.chat.template import ChatTemplates
from outrider.server.chat.tools import FORMATS, ToolFormat, detect_format, tool_parser
from outrider.server.chat.tools.formats import Words, is_slot
from outrider.server.chat.tools.gemma import QUOTE

# Formats derived from a template have this name.
NAME = "response_template"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# The opening marker contains the function's name.
NAMED = {"name": "{name}", "arguments": "{content}"}
PLACEHOLDER = re.compile(r"\{(?:content\.)?(\w+)\}")
PATTERN_WORD = re.compile(
    r"\(\?P<(?P<group>\w+)>[^()]*\)|(?P<space>\\s[*+]|\\n[?*+]?| [?*+])|\\(?P<escaped>[^\w\s])|(?P<plain>[^\\^$.|?*+()\[\]{}])"
)
EXAMPLE_NAME, EXAMPLE_ARGUMENTS = "outrider_example", {"city": "Rome"}
EXAMPLE_CALL = {
    "id": "example01",
    "type": "function",
    "function": {"name": EXAMPLE_NAME, "arguments": EXAMPLE_ARGUMENTS},
}
EXAMPLE: list[dict[str, Any]] = [
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]},
]


def tool_format_of(templates: ChatTemplates, response_template: Any) -> ToolFormat | None:
    """The format of the model's tool calls; None if it is unknown.

    A chat template that renders no tools takes the most common format, which the prompt then describes.
    """
    if not templates:
        return None
    template = templates.choose(has_tools=True)
    format = detect_format(template.text)
    if format is None and response_template is not None:
        format = derive_tools(response_template, template.try_render(EXAMPLE))
    return FORMATS["hermes"] if format is None and not template.abilities.tools else format


class Underivable(ValueError):
    """The response template says something that a format cannot express."""


def derive_tools(template: Any, rendered: str = "") -> ToolFormat | None:
    """The format of a response template's tool calls; None if it has none, or one that cannot be derived.

    `rendered` is the conversation EXAMPLE as the chat template writes it. A format that misreads the call in it is not used.
    """
    try:
        format = calls_format(field_of(template, "tool_calls"))
    except Underivable:
        return None
    return format if EXAMPLE_NAME not in rendered or reads_example(format, rendered) else None


def derive_reasoning(template: Any) -> ReasoningFormat | None:
    """The format of a response template's reasoning; None if it has none, or one that cannot be derived."""
    for name in REASONING_FIELDS:
        if markers := marker_pair(field_of(template, name)):
            return ReasoningFormat(NAME, *markers, (), marker_pair(field_of(template, "content")))
    return None


def calls_format(field: dict[str, Any]) -> ToolFormat:
    """The format of the field of tool calls. Raises Underivable."""
    opening, closing = anchor(field, "open"), anchor(field, "close")
    content, arguments = field.get("content"), mapping(field.get("content_args"))
    function = mapping(field.get("transform")).get("function")
    slots = [word for word in (*opening, *closing) if is_slot(word)]
    if not opening or is_slot(opening[0]) or slots != (["%name"] if function == NAMED else []):
        raise Underivable("markers")
    single = not field.get("repeats")
    if function == NAMED and content == "xml-inline" and closing:
        call, parameter = (*opening, "%parameters", *closing), parameter_words(arguments.get("tag_pattern"))
        return ToolFormat(NAME, "", call, (), parameter=parameter, single=single)
    if content != "json":
        raise Underivable("content")
    if function == NAMED:
        quotes = arguments.get("string_delims")
        if (quotes or arguments.get("unquoted_keys")) and quotes != [[QUOTE, QUOTE]]:
            raise Underivable("values")
        return ToolFormat(NAME, "", (*opening, "%fields" if quotes else "%arguments", *closing), (), single=single)
    name_key, key = object_keys(function)
    if not field.get("transform_each"):
        return ToolFormat(NAME, "", (*opening, "%object", *closing), (), name_key=name_key, key=key, single=single)
    before, after = (*opening, "["), ("]", *closing)
    return ToolFormat(NAME, "", ("%object",), (), before, ", ", after, name_key=name_key, key=key)


def object_keys(function: Any) -> tuple[str, str]:
    """The keys of the name and of the arguments in a call as a JSON object. Raises Underivable."""
    if function == "{content}":
        return "name", "arguments"
    found = [PLACEHOLDER.fullmatch(str(mapping(function).get(key))) for key in ("name", "arguments")]
    if found[0] is None or found[1] is None:
        raise Underivable("transform")
    return found[0][1], found[1][1]


def parameter_words(pattern: Any) -> Words:
    """The words of one argument between tags. Raises Underivable."""
    words = pattern_words(pattern)
    slots = [word for word in words if is_slot(word)]
    texts = "".join("%" if is_slot(word) else "x" for word in words if word.strip())
    if slots != ["%key", "%value"] or texts != "x%x%x":
        raise Underivable("tag")
    return words


def anchor(field: dict[str, Any], side: str) -> Words:
    """The words of a field's opening or closing marker; none if the field has no such marker. Raises Underivable."""
    literal, pattern = field.get(side), field.get(f"{side}_pattern")
    if isinstance(literal, list) and len(literal) == 1:
        literal = literal[0]
    if isinstance(literal, str):
        return (literal.strip(),) if literal.strip() else ()
    if literal is not None:
        raise Underivable("alternatives")
    return () if pattern is None else pattern_words(pattern)


def pattern_words(pattern: Any) -> Words:
    """The words of a regex that consists of texts, whitespace and named groups. Raises Underivable."""
    words, at = [""], 0
    while at < len(str(pattern)):
        found = PATTERN_WORD.match(str(pattern), at)
        if found is None:
            raise Underivable("pattern")
        at = found.end()
        if found["group"] or found["space"]:
            words += [f"%{found['group']}" if found["group"] else "\n", ""]
        else:
            words[-1] += found["escaped"] or found["plain"]
    words = [word for word in words if word]
    while words and not words[0].strip():
        del words[0]
    while words and not words[-1].strip():
        del words[-1]
    return tuple(words)


def marker_pair(field: dict[str, Any]) -> tuple[str, str] | None:
    """The texts around a field; None if the field is not between two fixed texts."""
    try:
        opening, closing = anchor(field, "open"), anchor(field, "close")
    except Underivable:
        return None
    if len(opening) != 1 or len(closing) != 1:
        return None
    return opening[0], closing[0]


def reads_example(format: ToolFormat, rendered: str) -> bool:
    """Whether the last call in a rendered conversation is read as the one of EXAMPLE."""
    parser = tool_parser(format, {EXAMPLE_NAME: {"type": "object", "properties": {"city": {"type": "string"}}}})
    parts = [*parser.feed(rendered), *parser.finish()]
    names = [part for part in parts if part.kind == "call"]
    if not names or names[-1].text != EXAMPLE_NAME:
        return False
    arguments = "".join(part.text for part in parts if part.kind == "arguments" and part.call == names[-1].call)
    try:
        return bool(json.loads(arguments) == EXAMPLE_ARGUMENTS)
    except ValueError:
        return False


def field_of(template: Any, name: str) -> dict[str, Any]:
    """A field of a response template; empty if there is none."""
    return mapping(mapping(mapping(template).get("fields")).get(name))


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}
