"""The endpoints of /v1/responses."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.openai.chat import ChatEndpoint
from outrider.server.openai.generation import GenerationRunner, GenerationTask
from outrider.server.openai.responses.formatter import ResponseFormatter
from outrider.server.openai.responses.items import InputItem, input_item, references
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.responses.store import ResponseStore, StoredResponse


class ResponsesEndpoint:
    """/v1/responses. A response runs as a chat that continues the conversation of the previous response."""

    def __init__(
        self,
        chat: ChatEndpoint,
        vocabulary: Vocabulary,
        store: ResponseStore,
        runner: GenerationRunner,
    ) -> None:
        self._chat = chat
        self._vocabulary = vocabulary
        self._store = store
        self._runner = runner

    async def create(self, http: HTTPRequest, body: ResponsesBody) -> Response:
        """Answers a request. Raises APIError, EngineError and RequestValidationError."""
        arrived = time.monotonic()
        principal, response_id = http.state.principal, f"resp_{uuid.uuid4().hex}"
        previous = None
        if body.previous_response_id is not None:
            previous = self._store.get(body.previous_response_id, principal, "previous_response_id")
        new_session = response_id if body.stores else None  # nothing can continue a response that is not stored
        session = previous.session if previous else new_session
        earlier, stored = previous.messages if previous else [], self._referenced(body, principal)
        messages = await in_turn(http, lambda: body.messages(earlier, stored))
        if not messages and body.instructions is None:
            raise APIError(400, "'input' has nothing that the model can read; give at least one message.", "input")
        try:
            chat_body = await in_turn(http, lambda: body.to_chat(messages, session))
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        chat = await self._chat.prepare(http, chat_body)
        logprobs_vocabulary = self._vocabulary if chat_body.returns_logprobs else None
        params = chat.requests[0].params
        formatter = ResponseFormatter(body, response_id, params, chat.new_parser, logprobs_vocabulary)

        def store() -> None:
            if body.stores:
                conversation = [*messages, formatter.message()]  # instructions apply to one response only
                self._store.put(StoredResponse(principal, formatter.response, conversation, session or response_id))

        task = GenerationTask(
            chat.requests,
            formatter,
            arrived,
            padded=chat_body.pads_stream,
            new_stop=chat.new_stop,
            on_complete=store,
        )
        return report_ignored(http, await self._runner.respond(http, task, bool(body.stream)), chat.ignored(body.ignored))

    def retrieve(self, http: HTTPRequest, response_id: str) -> dict[str, Any]:
        """A stored response. Raises APIError."""
        return self._store.get(response_id, http.state.principal).response

    def delete(self, http: HTTPRequest, response_id: str) -> dict[str, Any]:
        """Deletes a stored response. Raises APIError."""
        self._store.delete(response_id, http.state.principal)
        return {"id": response_id, "object": "response", "deleted": True}

    def cancel(self, http: HTTPRequest, response_id: str) -> dict[str, Any]:
        """Raises APIError: a stored response is finished, and there are no background responses."""
        self._store.get(response_id, http.state.principal)
        message = "Only background responses can be cancelled; to cancel any other, close its connection."
        raise APIError(400, message, "response_id")

    def _referenced(self, body: ResponsesBody, principal: str) -> dict[str, InputItem]:
        """The stored items that the input names. Raises APIError."""
        ids = references(body.input)
        if len(set(ids)) < len(ids):
            raise APIError(400, "'input' names an item twice; name each stored item once.", "input", "invalid_value")
        return {name: input_item(item) for name, item in self._store.items(ids, principal).items()}
