"""POST /api/chat and /api/generate: the requests run as chats, or as completions where no chat template is wanted."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.responses import JSONResponse

from outrider.server.chat.reasoning_parser import ReasoningParser, thinking_arguments
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.ollama.formatter import MEDIA_TYPE, AnswerFormatter, JSONLine, Piece, Times, answer
from outrider.server.ollama.schema import ChatMessage, ChatRequest, GenerateRequest
from outrider.server.openai.chat import ChatEndpoint, EncodedChat, PreparedChat
from outrider.server.openai.completions import CompletionsEndpoint
from outrider.server.openai.conversation import MediaPart, Message, PicturePart, TextPart, content_text
from outrider.server.openai.fields import SamplingFields
from outrider.server.openai.generation import GenerationTask
from outrider.server.openai.models import ModelNames
from outrider.server.openai.schema import ChatBody, CompletionBody
from outrider.server.settings import Settings

# The dispatcher of several models, which loads and unloads them, records here when it got a request.
DISPATCHED = "dispatched_at"


@dataclass(frozen=True)
class OllamaEndpoint:
    """The endpoints that generate text."""

    settings: Settings
    names: ModelNames
    chat: ChatEndpoint
    completions: CompletionsEndpoint

    async def create(self, http: HTTPRequest, body: ChatRequest | GenerateRequest) -> Response:
        """Answers a request. Raises APIError and EngineError."""
        arrived = time.monotonic()
        await self.completions.requests.ready()
        if body.is_empty:
            return JSONResponse(self._without_prompt(http, body))
        times = Times(http.scope.get(DISPATCHED, arrived), arrived, time.monotonic())
        chat, ignored = await self._prepared(http, body)
        stats: dict[str, Any] = {}
        task = GenerationTask(
            chat.requests,
            AnswerFormatter(body, self.completions.vocabulary, chat.new_parser, times, stats),
            arrived,
            media_type=MEDIA_TYPE,
            keep_alive=JSONLine(answer(body, Piece())).encode(),
            new_stop=chat.new_stop,
            stats=stats,
        )
        response = await self.completions.runner.respond(http, task, body.streams)
        return report_ignored(http, response, [*body.ignored, *ignored])

    def _without_prompt(self, http: HTTPRequest, body: ChatRequest | GenerateRequest) -> dict[str, Any]:
        """The answer to a request that only loads the model or unloads it. Raises APIError."""
        self.names.check(body.model_name)
        if body.unloads and DISPATCHED not in http.scope:
            message = "This server keeps its only model in memory; start it with models.paths to unload models."
            raise APIError(400, message, "keep_alive", "invalid_value")
        return answer(body, Piece()) | {"done": True, "done_reason": "unload" if body.unloads else "load"}

    async def _prepared(self, http: HTTPRequest, body: ChatRequest | GenerateRequest) -> tuple[PreparedChat, list[str]]:
        """The request, ready to run, and names of what was left out. Raises APIError and EngineError."""
        templates = self.completions.prompts.templates
        if isinstance(body, GenerateRequest) and (body.is_text or not (templates or body.system or body.images)):
            requests, unenforced = await self.completions.prepare(http, to_completion(body))
            encoded = EncodedChat(requests[0].prompt, [], False)
            return PreparedChat(requests, encoded, ReasoningParser, unenforced=unenforced), [*unenforced]
        arguments = thinking_arguments(templates.text, self.settings.limits.template_arguments)
        chat_body = await in_turn(http, lambda: to_chat(body, arguments))
        chat = await self.chat.prepare(http, chat_body)
        return chat, chat.ignored(chat_body.ignored)


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
