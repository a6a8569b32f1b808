"""Converts the bodies of Ollama's API to chats and completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from outrider.server.ollama.schema import ChatMessage, ChatRequest, GenerateRequest
from outrider.server.openai.conversation import MediaPart, Message, PicturePart, TextPart, content_text
from outrider.server.openai.fields import SamplingFields
from outrider.server.openai.schema import ChatBody, CompletionBody

# Ollama penalises no repetition where it samples with its own engine.
OLLAMA_DEFAULTS = SamplingFields(temperature=0.8, top_p=0.9, top_k=40, min_p=0.0, repetition_penalty=1.0)


class OllamaChat(ChatBody):
    """A chat with Ollama's defaults."""

    api_defaults: ClassVar[SamplingFields] = OLLAMA_DEFAULTS


class OllamaCompletion(CompletionBody):
    """A completion with Ollama's defaults."""

    api_defaults: ClassVar[SamplingFields] = OLLAMA_DEFAULTS


def to_chat(body: ChatRequest | GenerateRequest, thinking_arguments: Sequence[str]) -> ChatBody:
    """The request as a chat. `thinking_arguments` are those of the chat template."""
    messages = [*map(to_message, body.messages or ())] if isinstance(body, ChatRequest) else [*to_messages(body)]
    last = messages[-1]
    return OllamaChat.model_construct(  # its parts are valid
        messages=messages,
        continue_final_message=last.role == "assistant" and not last.tool_calls,
        tools=body.tools if isinstance(body, ChatRequest) else None,
        reasoning_effort={"max": "high"}.get(body.think, body.think) if isinstance(body.think, str) else None,
        chat_template_kwargs=None if body.think is None else dict.fromkeys(thinking_arguments, bool(body.think)),
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **body.fields,
    )


def to_completion(body: GenerateRequest) -> CompletionBody:
    """A request without the chat template as a completion."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return OllamaCompletion.model_construct(prompt=body.prompt or "", suffix=body.suffix, logprobs=logprobs, **body.fields)


def to_messages(body: GenerateRequest) -> Iterator[Message]:
    """The system prompt and the prompt as messages."""
    if body.system:
        yield Message(role="system", content=body.system)
    yield to_message(ChatMessage(role="user", content=body.prompt, images=body.images))


def to_message(message: ChatMessage) -> Message:
    """The message with its pictures as parts of its content, and the name of its tool as OpenAI's API has it."""
    updates: dict[str, Any] = {"name": message.tool_name} if message.tool_name else {}
    if message.images:
        parts: list[TextPart | MediaPart] = [PicturePart(type="image", image_url=url_of(data)) for data in message.images]
        updates["content"] = [*parts, TextPart(type="text", text=content_text(message.content))]
    return message.model_copy(update=updates) if updates else message


def url_of(picture: str) -> str:
    """The data URL of a picture in base64, which some clients send as such a URL."""
    return picture if picture.startswith("data:") else f"data:image;base64,{picture}"
