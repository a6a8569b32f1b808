"""/v1/responses: its bodies as chat requests, and the store that conversations go on from."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from server.http.errors import APIError
from server.openai.conversation import (
    NAME,
    Body,
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
)
from server.openai.schema import ChatBody, JsonSchema, ResponseFormat, SpeculationBody, StreamOptions, refuse_unsupported

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "moderation": (None,),
    "context_management": (None, []),
    "truncation": (None, "disabled"),
}
LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """The same as chat has it."""
        return Tool(type="function", function=FunctionDefinition.model_validate(self.model_dump(exclude={"type"})))


class ChosenTool(Body):
    type: Literal["function"]
    name: str


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]


class ReasoningItem(Body):
    type: Literal["reasoning"]


class TextFormat(Body):
    """`text.format`: what `response_format` says, laid flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def response_format(self) -> ResponseFormat:
        """The same as chat has it."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_validate({"name": self.name, "schema": self.schema_, "strict": self.strict is not False})
        return ResponseFormat(type="json_schema", json_schema=schema)

    @model_validator(mode="after")
    def _named(self) -> TextFormat:
        if self.type == "json_schema":
            self.response_format()  # its rules are ours
        return self


class TextSettings(Body):
    format: TextFormat | None = None


class ReasoningSettings(Body):
    effort: str | None = None


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: str
    input: str | list[MessageItem | CallItem | ResultItem | ReasoningItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    speculation: SpeculationBody | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_unsupported(cls, body: Any) -> Any:
        return refuse_unsupported(body, UNSUPPORTED)

    def chat(self, earlier: Sequence[Message], session: str) -> ChatBody:
        """The request as chat has it, after the messages of earlier responses. Raises pydantic's ValidationError."""
        said = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenTool):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        return ChatBody(
            model=self.model,
            messages=[*said, *earlier, *messages_of(self.input)],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            tools=[tool.tool() for tool in self.tools or ()] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.text.format.response_format() if self.text and self.text.format else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            stream=self.stream,
            stream_options=self.stream_options,
            logprobs=LOGPROBS in (self.include or ()) or self.top_logprobs is not None,
            top_logprobs=self.top_logprobs,
            session_id=self.prompt_cache_key or session,
            speculation=self.speculation,
        )


def messages_of(given: str | Sequence[MessageItem | CallItem | ResultItem | ReasoningItem]) -> list[Message]:
    """Input items as a conversation's messages; neighbouring calls are one turn of the assistant."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    found: list[Message] = []
    for item in given:
        match item:
            case MessageItem():
                found.append(Message(role=item.role, content=item.content))
            case CallItem():
                call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                if found and found[-1].role == "assistant":
                    found[-1] = found[-1].model_copy(update={"tool_calls": [*(found[-1].tool_calls or ()), call]})
                else:
                    found.append(Message(role="assistant", tool_calls=[call]))
            case ResultItem():
                found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
            case ReasoningItem():
                pass  # a template takes no earlier reasoning
    return found


@dataclass
class Stored:
    """A response that was kept, and the conversation up to its end."""

    principal: str
    response: dict[str, Any]
    messages: list[Message]
    root: str  # the first response of the conversation
    expires: float = field(default=0.0)  # time.monotonic()


class ResponseStore:
    """In memory, for a time, as many as fit; the oldest go first. Every principal sees their own."""

    def __init__(self, capacity: int, ttl_seconds: float) -> None:
        self._capacity = capacity
        self._ttl_seconds = ttl_seconds
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        """Keeps a response, under its id."""
        stored.expires = time.monotonic() + self._ttl_seconds
        self._kept[stored.response["id"]] = stored
        while len(self._kept) > self._capacity or next(iter(self._kept.values())).expires < time.monotonic():
            self._kept.popitem(last=False)
            if not self._kept:
                return

    def get(self, identity: str, principal: str, param: str = "response_id") -> Stored:
        """The response of that id. Raises APIError."""
        stored = self._kept.get(identity)
        if stored is None or stored.principal != principal or stored.expires < time.monotonic():
            raise APIError(404, f"There is no response {identity!r}; it may have expired.", param, "response_not_found")
        return stored

    def delete(self, identity: str, principal: str) -> None:
        """Forgets the response of that id. Raises APIError."""
        self.get(identity, principal)
        del self._kept[identity]
