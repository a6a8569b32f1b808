"""A conversation as clients send it: messages, and the tools and calls in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # of functions


class Body(BaseModel):
    # Strict: "5" is not a number and 1 is not a bool, as with OpenAI.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class TextPart(Body):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""


def joined(content: str | Sequence[TextPart] | None) -> str:
    """Content as one text."""
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content or ())


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """The client's choice of one tool."""

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
    def _known_parts(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "input_text", "output_text", "refusal"):
                raise ValueError(f"content parts must be of type 'text'; this model takes no {kind!r}")
        return content

    def rendered(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        shown: dict[str, Any] = {"role": role, "content": joined(self.content)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                shown[name] = getattr(self, name)
        if self.tool_calls:
            shown["tool_calls"] = [
                {"id": c.id, "type": c.type, "function": {"name": c.function.name, "arguments": parsed(c.function.arguments)}}
                for c in self.tool_calls
            ]
        return shown


def parsed(arguments: str) -> Any:
    """A call's arguments as templates want them: parsed, where they are JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
