"""Request bodies of /v1/responses, and their conversion to chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from server.openai.conversation import (
    NAME_PATTERN,
    Body,
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
    reject_unsupported,
)
from server.openai.schema import ChatBody, JsonSchema, ResponseFormat, SpeculationBody, StreamOptions

# As in `schema`: unsupported fields, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "moderation": (None,),
    "context_management": (None, []),
    "truncation": (None, "disabled"),
}
INCLUDE_LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> Tool:
        """The same tool in a chat's body."""
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
    """`text.format`, the counterpart of a chat's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def to_chat(self) -> ResponseFormat:
        """The same format in a chat's body. Raises pydantic's ValidationError."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_validate({"name": self.name, "schema": self.schema_, "strict": self.strict is not False})
        return ResponseFormat(type="json_schema", json_schema=schema)

    @model_validator(mode="after")
    def _valid_in_a_chat(self) -> TextFormat:
        self.to_chat()
        return self


class TextSettings(Body):
    format: TextFormat | None = None


class ReasoningSettings(Body):
    effort: str | None = None


InputItem = MessageItem | CallItem | ResultItem | ReasoningItem


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: str
    input: str | list[InputItem]
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
    def _reject_unsupported(cls, body: Any) -> Any:
        return reject_unsupported(body, UNSUPPORTED)

    @property
    def stores(self) -> bool:
        """Whether the response can be retrieved and continued later."""
        return self.store is not False

    @property
    def text_format(self) -> TextFormat:
        """`text.format`, or its default."""
        return self.text.format if self.text and self.text.format else TextFormat(type="text")

    def to_chat(self, earlier: Sequence[Message], session: str) -> ChatBody:
        """The request as a chat that continues the `earlier` messages. Raises pydantic's ValidationError."""
        instructions = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenTool):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        return ChatBody(
            model=self.model,
            messages=[*instructions, *earlier, *to_messages(self.input)],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            tools=[tool.to_chat() for tool in self.tools or ()] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.text.format.to_chat() if self.text and self.text.format else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            stream=self.stream,
            stream_options=self.stream_options,
            logprobs=INCLUDE_LOGPROBS in (self.include or ()) or self.top_logprobs is not None,
            top_logprobs=self.top_logprobs,
            session_id=self.prompt_cache_key or session,
            speculation=self.speculation,
        )


def to_messages(items: str | Sequence[InputItem]) -> list[Message]:
    """Input items as messages. Consecutive calls, and calls after the assistant's text, become one assistant message."""
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem():
                messages.append(Message(role=item.role, content=item.content))
            case CallItem():
                call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                if messages and messages[-1].role == "assistant":
                    calls = [*(messages[-1].tool_calls or ()), call]
                    messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
                else:
                    messages.append(Message(role="assistant", tool_calls=[call]))
            case ResultItem():
                messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
            case ReasoningItem():
                pass  # earlier reasoning is not part of the prompt
    return messages
