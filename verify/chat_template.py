"""Renders a model's chat templates as transformers does: programs in Jinja, in a sandbox. Imports no transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]
# The names of templates in a tokenizer that has several.
DEFAULT, TOOL_USE = "default", "tool_use"
# What rendering raises: expressions of a template, too.
ERRORS = (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
# Names of an answer's reasoning; templates read the first one, gpt-oss's the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Stands for the end of a message that is left open.
OPEN_END = "OUTRIDER_OPEN_END "


def render(
    text: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation by a template. With `continue_final_message`, it ends where the last message does.

    Raises what templates raise, and ValueError if there is no message, or if the template drops the end of the last one.
    """
    if not messages:
        raise ValueError("There are no messages.")
    conversation = [with_reasoning({name: value for name, value in each.items() if value is not None}) for each in messages]
    end = leave_open(conversation[-1]) if continue_final_message else ""
    given = {"documents": None, **variables, "messages": conversation, "tools": tools}
    found = compiled(text).render(**given, add_generation_prompt=add_generation_prompt)
    return cut(found, end) if continue_final_message else found


def chosen(templates: str | Mapping[str, str], has_tools: bool) -> str:
    """The template for a conversation with tools, or without them, of those that a tokenizer has."""
    if isinstance(templates, str):
        return templates
    return templates[TOOL_USE if has_tools and TOOL_USE in templates else DEFAULT]


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning by all names that templates read."""
    found = next((message[name] for name in REASONING if name in message), None)
    return message if found is None else {REASONING[1]: found, **message, REASONING[0]: found}


def leave_open(message: dict[str, Any]) -> str:
    """Marks the end of a message's text in place, and returns the text. Raises ValueError if it has none."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + OPEN_END
        return content
    parts = [dict(part) for part in content or () if isinstance(part, Mapping)]
    last = next((part for part in reversed(parts) if "text" in part), None)
    if last is None:
        raise ValueError("The last message has no text that could be continued.")
    message["content"], text = parts, str(last["text"])
    last["text"] = text + OPEN_END
    return text


def cut(rendered: str, end: str) -> str:
    """The rendered text up to the mark of the last message's end. Raises ValueError if there is none."""
    place = rendered.rfind(OPEN_END.strip())
    if place < 0 or end.strip() not in rendered:
        raise ValueError("The template leaves out the end of the last message, which should be continued.")
    kept = rendered[:place]
    return kept if rendered.startswith(OPEN_END, place) else kept.rstrip()  # the template has trimmed the message


@lru_cache(64)
def compiled(text: str) -> Template:
    """A template. Raises TemplateError."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.globals |= {"dict": lambda *given, **named: dict(*given, **named), "namespace": PlainNamespace}
    return environment.from_string(text)


def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    """Refuses a conversation; templates call it."""
    raise TemplateError(message)


class Generation(Extension):
    """A block around an assistant's text, which changes nothing of it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainNamespace(Namespace):
    """Refuses names with which a template could reach Python's own attributes."""

    def __init__(*arguments: Any, **named: Any) -> None:  # so that `namespace(self=...)` works
        self, given = arguments[0], dict(*arguments[1:], **named)
        for name in given:
            check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: Any) -> None:
    """Raises SecurityError for a name that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A namespace of a chat template has no attribute {name!r}.")
