"""POST /api/chat and /api/generate: the requests run as chats, or as completions where no chat template is wanted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.responses import JSONResponse

from outrider.server.chat.reasoning_parser import ReasoningParser, thinking_arguments
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.ollama.conversion import to_chat, to_completion
from outrider.server.ollama.formatter import MEDIA_TYPE, AnswerFormatter, JSONLine, Piece, Times, answer
from outrider.server.ollama.schema import ChatRequest, GenerateRequest
from outrider.server.openai.chat import ChatEndpoint, EncodedChat, PreparedChat
from outrider.server.openai.completions import CompletionsEndpoint
from outrider.server.openai.generation import GenerationTask
from outrider.server.openai.models import ModelNames
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
