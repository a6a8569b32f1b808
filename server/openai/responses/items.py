"""Input items of /v1/responses, and their conversion to messages."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from outrider.server.openai import conversation
from outrider.server.openai.fields import MAX_ENTRIES, MAX_PARTS, Body


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: conversation.Content | None = None


def full_name(namespace: str | None, name: str) -> str:
    """The name under which the model sees a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str | None = None
    namespace: str | None = None
    name: str
    arguments: conversation.ArgumentText = ""

    def to_chat(self) -> conversation.ToolCall:
        """The same call in a chat's message."""
        called = conversation.CalledFunction(name=full_name(self.namespace, self.name), arguments=self.arguments)
        return conversation.ToolCall(id=self.call_id, function=called)


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: str | None = None
    namespace: str | None = None
    name: str
    input: conversation.ArgumentText = ""

    def to_chat(self) -> conversation.CustomToolCall:
        """The same call in a chat's message."""
        called = conversation.CalledCustom(name=full_name(self.namespace, self.name), input=self.input)
        return conversation.CustomToolCall(id=self.call_id, type="custom", custom=called)


class ResultItem(Body):
    """The result of a call of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: conversation.Content | None = None


class ReasoningPart(Body):
    type: str
    text: str = ""


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(Body):
    """Earlier reasoning. The model reads `content`, which it wrote, or else the summary; encrypted content is left out."""

    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


class ItemReference(Body):
    """An output item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: str


class OtherItem(Body):
    """An item of a tool that this server does not have. It is left out of the prompt."""

    type: Annotated[str, Field(max_length=64)]


def content_of(item: object) -> conversation.Content | None:
    """The content of a message, or the result of a call; None for other items."""
    return item.content if isinstance(item, MessageItem) else item.output if isinstance(item, ResultItem) else None


TAGS = {
    "message": "[message]",
    "function_call": "[function_call]",
    "custom_tool_call": "[custom_tool_call]",
    "function_call_output": "[result]",
    "custom_tool_call_output": "[result]",
    "reasoning": "[reasoning]",
    "item_reference": "[item_reference]",
}


def item_type(item: Any) -> str | None:
    """The tag of an input item. Without a type, it is a message, or a reference if it has no role."""
    if not isinstance(item, dict):
        given = getattr(item, "type", None)
        return "[item_reference]" if isinstance(item, ItemReference) else TAGS.get(given or "", "[other]" if given else None)
    given = item.get("type")
    if given is None:
        return "[item_reference]" if "id" in item and "role" not in item else "[message]"
    return TAGS.get(given, "[other]") if isinstance(given, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CustomCallItem, Tag("[custom_tool_call]")]
    | Annotated[ResultItem, Tag("[result]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")]
    | Annotated[OtherItem, Tag("[other]")],
    Discriminator(item_type, "unknown_item", "Input items should be objects whose 'type' is a string"),
]
InputItems = Annotated[list[InputItem], Field(max_length=MAX_ENTRIES, fail_fast=True)]
STORED_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


def input_item(item: Mapping[str, Any]) -> InputItem:
    return STORED_ITEM.validate_python(item)


def to_messages(items: str | Sequence[InputItem], stored: Mapping[str, InputItem] | None = None) -> list[conversation.Message]:
    """Input items as messages. `stored` are the items that references name.

    Consecutive calls, and calls after the assistant's text, become one assistant message, together with the reasoning before.
    """
    if isinstance(items, str):
        return [conversation.Message(role="user", content=items)]
    messages: list[conversation.Message] = []
    reasoning: str | None = None  # reasoning that belongs to the next message of the assistant
    for item in items:
        if isinstance(item, ItemReference):
            item = (stored or {})[item.id]
        if isinstance(item, ReasoningItem):
            reasoning = (reasoning or "") + item.text or None
        elif isinstance(item, MessageItem) and item.role == "assistant":
            messages.append(conversation.Message(role="assistant", content=item.content, reasoning_content=reasoning))
            reasoning = None
        elif isinstance(item, MessageItem):
            messages += [conversation.Message(role="assistant", reasoning_content=reasoning)] if reasoning else []
            messages.append(conversation.Message(role=item.role, content=item.content))
            reasoning = None
        elif isinstance(item, ResultItem):
            messages.append(conversation.Message(role="tool", content=item.output, tool_call_id=item.call_id))
            reasoning = None
        elif isinstance(item, CallItem | CustomCallItem):
            add_call(messages, item.to_chat(), reasoning)
            reasoning = None
    return messages


def add_call(messages: list[conversation.Message], call: conversation.AnyToolCall, reasoning: str | None) -> None:
    """Adds a call to the last message if that is the assistant's, else as a new message."""
    if not messages or messages[-1].role != "assistant":
        messages.append(conversation.Message(role="assistant", reasoning_content=reasoning, tool_calls=[call]))
        return
    last = messages[-1]
    if last.tool_calls is not None:
        last.tool_calls.append(call)
    if last.tool_calls is None or reasoning:
        thought = (last.reasoning_content or "") + (reasoning or "") or None
        messages[-1] = last.model_copy(update={"tool_calls": last.tool_calls or [call], "reasoning_content": thought})


def with_system(instructions: str | None, messages: Sequence[conversation.Message]) -> list[conversation.Message]:
    """The messages after one system message: the instructions, then the system and developer messages at the beginning."""
    leading = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    texts = [] if instructions is None else [instructions]
    texts += [conversation.content_text(message.content) for message in leading]
    system = [conversation.Message(role="system", content="\n\n".join(texts))] if texts else []
    return [*system, *messages[len(leading) :]]


def references(items: str | Iterable[InputItem]) -> list[str]:
    return [] if isinstance(items, str) else [item.id for item in items if isinstance(item, ItemReference)]
