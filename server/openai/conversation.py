"""Conversations: messages, and the tools and tool calls in them; the base class of request bodies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"  # of functions and schemas
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")


class Body(BaseModel):
    """Part of a request body. Strict like OpenAI's: "5" is not a number, and 1 is not a bool."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def reject_unsupported(body: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> Any:
    """The body, if its unsupported fields have only values without effect. Raises PydanticCustomError."""
    for name, without_effect in unsupported.items():
        if isinstance(body, dict) and body.get(name) not in without_effect:
            message = "'{name}' is not supported by this server; leave it out"
            raise PydanticCustomError("unsupported", message, {"name": name})
    return body


class TextPart(Body):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""


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


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """`tool_choice` that names one tool."""

    type: Literal["function"]
    function: FunctionName


class Message(Body):
    """One message; its content is text, or parts of text."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else []:
            part_type = part.get("type") if isinstance(part, dict) else None
            if part_type not in TEXT_TYPES:
                raise ValueError(f"content parts must be of type 'text'; this model does not support {part_type!r}")
        return content

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
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


def parse_arguments(arguments: str) -> Any:
    """A call's arguments as chat templates expect them: parsed if they are valid JSON, else as they are."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
