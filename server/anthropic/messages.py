"""/v1/messages and /v1/messages/count_tokens: the endpoints."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from outrider.server.anthropic.conversion import to_chat
from outrider.server.anthropic.formatter import PING, MessageFormatter
from outrider.server.anthropic.schema import CountTokensBody, MessagesBody
from outrider.server.chat.prompt import PromptEncoder
from outrider.server.chat.reasoning_parser import thinking_arguments
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.openai.chat import ChatEndpoint
from outrider.server.openai.generation import GenerationRunner, GenerationTask
from outrider.server.openai.schema import ChatBody
from outrider.server.openai.usage import Usage
from outrider.server.settings import Settings


class MessagesEndpoint:
    """Anthropic's API. A request runs as a chat."""

    def __init__(self, settings: Settings, prompts: PromptEncoder, chat: ChatEndpoint, runner: GenerationRunner) -> None:
        self._thinking_arguments = thinking_arguments(prompts.templates.text, settings.limits.template_arguments)
        self._chat = chat
        self._runner = runner

    async def create(self, http: HTTPRequest, body: MessagesBody) -> Response:
        """Answers a request. Raises APIError, EngineError and RequestValidationError."""
        arrived, usage = time.monotonic(), Usage()
        chat_body = await in_turn(http, lambda: self._to_chat(body))
        chat = await self._chat.prepare(http, chat_body)
        [request] = chat.requests
        message_id, prompt_tokens = f"msg_{request.id.rpartition('-')[0]}", len(request.prompt)
        formatter = MessageFormatter(body, message_id, http.state.request_id, prompt_tokens, usage, chat.new_parser)
        task = GenerationTask(chat.requests, formatter, arrived, keep_alive=PING.encode(), new_stop=chat.new_stop, usage=usage)
        return report_ignored(http, await self._runner.respond(http, task, bool(body.stream)), chat.ignored(body.ignored))

    async def count_tokens(self, http: HTTPRequest, body: CountTokensBody) -> Response:
        """The length of the prompt in tokens. Raises APIError, EngineError and RequestValidationError."""
        prompt = await self._chat.encode(http, await in_turn(http, lambda: self._to_chat(body)))
        return report_ignored(http, JSONResponse({"input_tokens": len(prompt.tokens)}), prompt.ignored(body.ignored))

    def _to_chat(self, body: CountTokensBody) -> ChatBody:
        """The request as a chat. Raises APIError and RequestValidationError."""
        arguments: dict[str, Any] = dict.fromkeys(self._thinking_arguments, body.thinks)
        try:
            return to_chat(body, arguments)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        except ValueError as error:
            raise APIError(400, f"Invalid body: {error}.", code="invalid_value") from None
