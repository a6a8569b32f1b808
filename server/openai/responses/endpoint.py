"""The endpoint of /v1/responses. What is stored is decoded in its principal's turn, like a body of its size."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import msgspec
from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.openai.chat import ChatEndpoint
from outrider.server.openai.conversation import Message
from outrider.server.openai.generation import NUMBER_BYTES, GenerationRunner, GenerationTask
from outrider.server.openai.responses.formatter import ResponseFormatter
from outrider.server.openai.responses.items import input_item, references
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.responses.store import ResponseStore, StoredResponse


@dataclass(frozen=True)
class ResponsesEndpoint:
    """/v1/responses. A response runs as a chat that continues the conversation of the previous response."""

    chat: ChatEndpoint
    vocabulary: Vocabulary
    store: ResponseStore
    runner: GenerationRunner

    async def create(self, http: HTTPRequest, body: ResponsesBody) -> Response:
        """Answers a request. Raises APIError, EngineError and RequestValidationError."""
        arrived = time.monotonic()
        principal, response_id = http.state.principal, f"resp_{uuid.uuid4().hex}"
        previous = None
        if body.previous_response_id is not None:
            previous = self.store.get(body.previous_response_id, principal, "previous_response_id")
        new_session = response_id if body.stores else None  # nothing can continue a response that is not stored
        session = previous.session if previous else new_session
        items = self._referenced(body, principal)

        def conversation() -> list[Message]:
            stored = {name: input_item(msgspec.json.decode(item)) for name, item in items.items()}
            return body.messages(previous.messages if previous else [], stored)

        size_bytes = http.scope.get("body_bytes", 0) + sum(map(len, items.values())) + (previous.size_bytes if previous else 0)
        messages = await in_turn(http, conversation, size_bytes)
        if not messages and body.instructions is None:
            raise APIError(400, "'input' has nothing that the model can read; give at least one message.", "input")
        try:
            chat_body = await in_turn(http, lambda: body.to_chat(messages, session), size_bytes)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        chat = await self.chat.prepare(http, chat_body)
        logprobs_vocabulary = self.vocabulary if chat_body.returns_logprobs else None
        params = chat.requests[0].params
        formatter = ResponseFormatter(body, response_id, params, chat.new_parser, logprobs_vocabulary)

        async def store() -> None:
            def encoded() -> StoredResponse:
                complete = [*messages, formatter.message()]  # instructions apply to one response only
                return StoredResponse(principal, formatter.answer, complete, session or response_id)

            numbers = task.usage.completion_tokens * (1 + (chat_body.top_logprobs or 0))
            self.store.put(await in_turn(http, encoded, size_bytes + numbers * NUMBER_BYTES))

        task = GenerationTask(
            chat.requests,
            formatter,
            arrived,
            padded=chat_body.pads_stream,
            new_stop=chat.new_stop,
            on_complete=store if body.stores else None,
        )
        return report_ignored(http, await self.runner.respond(http, task, bool(body.stream)), chat.ignored(body.ignored))

    def _referenced(self, body: ResponsesBody, principal: str) -> dict[str, bytes]:
        """The stored items that the input names, in JSON. Raises APIError."""
        ids = references(body.input)
        if len(set(ids)) < len(ids):
            raise APIError(400, "'input' names an item twice; name each stored item once.", "input", "invalid_value")
        return self.store.items(ids, principal)
