"""Conversations: messages, the tool calls in them, and the functions that they call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag

from outrider.server.chat.grammar_job import INPUT
from outrider.server.http import json_body
from outrider.server.openai.fields import MAX_ENTRIES, MAX_PARTS, TEXT_OR_LIST, Body, FreeForm, Name, Text

TEXT_TYPES = ("text", "input_text", "output_text", "refusal")


class TextPart(Body):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""


Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


def text_parts_only(content: Any) -> Any:
    """The content, if it has parts of text only. Raises ValueError."""
    for part in content if isinstance(content, list) else []:
        part_type = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
        if part_type not in TEXT_TYPES:
            raise ValueError(f"content parts must be of type 'text'; this model does not support {part_type!r}")
    return content


Content = Annotated[Text | Annotated[Parts, Tag("[array]")], TEXT_OR_LIST, BeforeValidator(text_parts_only)]


def content_text(content: str | Sequence[TextPart] | None) -> str:
    """Content as one string."""
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content or ())


class CalledFunction(Body):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(Body):
    """A call in an earlier turn of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(Body):
    name: str
    input: str


class CustomToolCall(Body):
    """A call of a custom tool in an earlier turn of the assistant."""

    id: str
    type: Literal["custom"]
    custom: CalledCustom

    @property
    def function(self) -> CalledFunction:
        """The call of the function that stands for the tool."""
        arguments = msgspec.json.encode({INPUT: self.custom.input}).decode()
        return CalledFunction(name=self.custom.name, arguments=arguments)


def tool_type(value: Any) -> str | None:
    """The tag of a tool, of its name in `tool_choice`, or of its call. Without a type, it is a function."""
    given = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{given}]" if given in ("function", "custom") else None


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("[function]")] | Annotated[CustomToolCall, Tag("[custom]")],
    Discriminator(tool_type, "unknown_tool", "Input should be an object of type 'function' or 'custom'"),
]


class FunctionDefinition(Body):
    name: Name
    description: str | None = None
    parameters: FreeForm | None = None  # JSON schema
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def as_function(self) -> Tool:
        """The function that the model sees."""
        return self

    @property
    def enforced(self) -> Tool:
        """The function whose calls a grammar enforces."""
        return self


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """`tool_choice` that names one tool."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


class Message(Body):
    """One message; its content is text, or parts of text."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[AnyToolCall], Field(max_length=MAX_ENTRIES, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content_text(self.content)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)]


def beginning(messages: Sequence[Message]) -> str:
    """The text of a conversation up to its first user message: later turns do not change it."""
    first = next((number for number, message in enumerate(messages) if message.role == "user"), len(messages))
    return "\0".join(f"{message.role}\0{content_text(message.content)}" for message in messages[: first + 1])


def parse_arguments(arguments: str) -> Any:
    """A call's arguments as chat templates expect them: parsed if they are valid JSON, else as they are."""
    try:
        return json_body.decode(arguments)
    except json_body.InvalidJSON:
        return arguments
