"""Converts the bodies of Anthropic's API to chats.

Promises that the same beginning of a conversation gives the same beginning of a chat, so that prefixes are reused.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, takewhile
from typing import Any

from outrider.server.anthropic import schema as anthropic
from outrider.server.http.errors import APIError
from outrider.server.openai import conversation as openai
from outrider.server.openai.schema import ChatBody
from outrider.server.openai.structures import JsonSchema, ResponseFormat

# Claude Code begins its system prompt with this line, whose content differs between requests.
BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
TOOL_MODES = {"auto": "auto", "any": "required", "none": "none"}
# Chat templates know low, medium and high.
EFFORTS = {"xhigh": "high", "max": "high"}


def to_chat(body: anthropic.CountTokensBody, template_arguments: dict[str, Any]) -> ChatBody:
    """The request as a chat. Raises APIError and ValueError."""
    messages = to_messages(body)
    config = body.output_config
    fields: dict[str, Any] = {}
    if isinstance(body, anthropic.MessagesBody):
        fields = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "prediction": body.prediction,
        }
    chat = ChatBody.model_construct(  # its parts are valid
        model=body.model,
        messages=messages,
        continue_final_message=messages[-1].role == "assistant" and not messages[-1].tool_calls,
        tools=[*to_tools(body)] or None,
        tool_choice=to_tool_choice(body.tool_choice),
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        response_format=to_response_format(body),
        reasoning_effort=EFFORTS.get(config.effort, config.effort) if config and config.effort else None,
        thinking_token_budget=body.thinking.budget_tokens if body.thinking and body.thinks else None,
        chat_template_kwargs=template_arguments,
        **fields,
    )
    chat.check_choice()
    return chat


def to_messages(body: anthropic.CountTokensBody) -> list[openai.Message]:
    """The system prompt and the turns as messages of a chat. Raises APIError."""
    leading = list(takewhile(lambda turn: turn.role == "system", body.messages))
    system = system_texts(chain(body.system_blocks, *(turn.blocks for turn in leading)))
    messages = [openai.Message(role="system", content="\n".join(system))] if system else []
    messages += merge(message for turn in body.messages[len(leading) :] for message in to_turn(turn))
    if messages and messages[-1].role == "assistant" and not (messages[-1].content or messages[-1].tool_calls):
        messages.pop()  # without a text, there is nothing to continue
    if all(message.role == "system" for message in messages):
        raise APIError(400, "The conversation has no messages of the user; add one.", "messages", "invalid_value")
    return messages


def merge(messages: Iterable[openai.Message]) -> Iterator[openai.Message]:
    """Consecutive messages of one role as one message: in Anthropic's API they are one turn. Tool results stay apart."""
    for role, group in groupby(messages, key=lambda message: message.role):
        run = list(group)
        if role == "tool" or len(run) == 1:
            yield from run
            continue
        yield openai.Message(
            role=role,
            content=joined([message.content for message in run], "" if role == "assistant" else "\n"),
            reasoning_content="\n".join(message.reasoning_content for message in run if message.reasoning_content) or None,
            tool_calls=[call for message in run for call in message.tool_calls or ()] or None,
        )


def joined(contents: Sequence[openai.Content | None], separator: str) -> openai.Content:
    """Contents as one: a text, or with pictures among them, parts, where the texts between two pictures are one."""
    parts = [
        part
        for content in contents
        for part in ([openai.TextPart(type="text", text=content)] if isinstance(content, str) else content or ())
    ]
    groups = [(kind, list(group)) for kind, group in groupby(parts, key=type)]
    if all(kind is openai.TextPart for kind, _ in groups):
        return separator.join(openai.content_text([part]) for part in parts)
    found: list[openai.TextPart | openai.MediaPart] = []
    for kind, group in groups:
        found += (
            [openai.TextPart(type="text", text=separator.join(openai.content_text([part]) for part in group))]
            if kind is openai.TextPart
            else group
        )
    return found


def to_turn(turn: anthropic.MessageParam) -> Iterable[openai.Message]:
    match turn.role:
        case "assistant":
            return [from_assistant(turn)]
        case "user":
            return from_user(turn)
        case "system":
            text = "\n".join(system_texts(turn.blocks))
            return [openai.Message(role="system", content=text)] if text else []


def from_assistant(turn: anthropic.MessageParam) -> openai.Message:
    """A turn of the assistant. Its texts are joined as they were generated."""
    texts = [block.text for block in turn.blocks if isinstance(block, anthropic.TextBlock)]
    reasoning = [block.thinking for block in turn.blocks if isinstance(block, anthropic.ThinkingBlock)]
    calls: list[openai.AnyToolCall] = [
        openai.ToolCall(id=block.id, function=openai.CalledFunction(name=block.name, arguments=block.input))
        for block in turn.blocks
        if isinstance(block, anthropic.ToolUseBlock)
    ]
    return openai.Message(
        role="assistant", content="".join(texts), reasoning_content="\n".join(reasoning) or None, tool_calls=calls or None
    )


def from_user(turn: anthropic.MessageParam) -> Iterator[openai.Message]:
    """A turn of the user: one message for each tool result and each other block."""
    for block in turn.blocks:
        if isinstance(block, anthropic.ToolResultBlock):
            yield openai.Message(role="tool", tool_call_id=block.tool_use_id, content=result_content(block))
        elif isinstance(block, anthropic.READ_BLOCKS):
            yield openai.Message(role="user", content=content_of(block))


def content_of(block: anthropic.ReadBlock) -> openai.Content:
    """A block as the content of a message: a picture, or a text."""
    if isinstance(block, anthropic.PictureBlock):
        return [openai.PicturePart(type=block.type, image_url=block.url)]
    return block.text


def result_content(block: anthropic.ToolResultBlock) -> openai.Content:
    """The content of a tool result. Chat templates have no field for failures, so the text names them."""
    content = joined(list(map(content_of, block.blocks)), "\n")
    if not block.is_error:
        return content
    return f"Error: {content}" if isinstance(content, str) else [openai.TextPart(type="text", text="Error:"), *content]


def system_texts(blocks: Iterable[object]) -> list[str]:
    """The texts of a system prompt, without the line that changes with every request."""
    texts = [(block.text, BILLING_LINE.match(block.text)) for block in blocks if isinstance(block, anthropic.TextBlock)]
    kept = [text[found.end() :] if found else text for text, found in texts]
    return [text for text in kept if text]


def to_tools(body: anthropic.CountTokensBody) -> list[openai.Tool]:
    """The tools that the model gets, without those of Anthropic's servers."""
    return [
        openai.Tool(
            type="function",
            function=openai.FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in body.custom_tools
    ]


def to_tool_choice(choice: anthropic.ToolChoice | None) -> Any:
    """A chat's `tool_choice`."""
    if choice is None:
        return None
    if choice.type == "tool":
        return openai.NamedTool(type="function", function=openai.FunctionName(name=choice.name or ""))
    return TOOL_MODES[choice.type]


def to_response_format(body: anthropic.CountTokensBody) -> ResponseFormat | None:
    """A chat's `response_format`."""
    if body.output_config is None or body.output_config.format is None:
        return None
    schema = JsonSchema.model_validate({"name": "answer", "schema": body.output_config.format.schema_, "strict": True})
    return ResponseFormat(type="json_schema", json_schema=schema)
