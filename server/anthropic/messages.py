"""/v1/messages and /v1/messages/count_tokens: the endpoints, and the format of a message and of its events."""

import time
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from outrider.server.anthropic.conversion import to_chat
from outrider.server.anthropic.schema import CountTokensBody, MessagesBody
from outrider.server.chat.prompt import PromptEncoder
from outrider.server.chat.reasoning_parser import thinking_arguments
from outrider.server.chat.tools import Part, ToolParser
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.http.sse import ServerSentEvent
from outrider.server.openai.chat import ChatEndpoint
from outrider.server.openai.conversation import parse_arguments
from outrider.server.openai.generation import ChoiceOutput, GenerationRunner, GenerationTask
from outrider.server.openai.output_parser import ItemsFormatter
from outrider.server.openai.schema import ChatBody
from outrider.server.openai.usage import Usage
from outrider.server.settings import Settings

# Reasoning needs a signature, which clients return with it. Nobody checks it.
SIGNATURE = "outrider"
PING = ServerSentEvent({"type": "ping"}, name="ping")
# Maps a block's type to the field of its deltas.
FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class MessageFormatter(ItemsFormatter):
    """Writes a message, whose items are content blocks, and its events."""

    def __init__(
        self,
        request: MessagesBody,
        message_id: str,
        request_id: str,
        prompt_tokens: int,
        usage: Usage,
        new_parser: Callable[[], ToolParser],
    ) -> None:
        """`usage` is the task's; it is read before the answer ends, too."""
        message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        super().__init__(message, message["content"], new_parser)
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._usage = usage
        self._omits_thinking = request.thinking is not None and request.thinking.display == "omitted"
        self._pieces: list[str] = []  # of the last block

    def start(self) -> list[ServerSentEvent]:
        message = {**self.answer, "content": [], "usage": self._usage_body()}
        return [event("message_start", message=message), PING]

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        events = self._write(self._parser.parse(output))
        if output.finish is not None:
            self.answer["stop_reason"] = self._stop_reason(output)
            self.answer["stop_sequence"] = output.stop_string
        return events

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        events = self._close()
        self.answer["usage"] = self._usage_body()
        delta = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        return [*events, event("message_delta", delta=delta, usage=self.answer["usage"]), event("message_stop")]

    def error(self, error: APIError) -> list[ServerSentEvent]:
        return [ServerSentEvent(error.anthropic_body(self._request_id), name="error")]

    def _stop_reason(self, output: ChoiceOutput) -> str:
        if output.stop_string is not None:
            return "stop_sequence"
        if output.finish == "length":
            return "max_tokens"
        return "tool_use" if any(block["type"] == "tool_use" for block in self._items) else "end_turn"

    def _usage_body(self) -> dict[str, Any]:
        """Tokens so far. Those read from a session's cache are not input tokens; writing them costs nothing extra."""
        cached = self._usage.cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._parser.reasoning_tokens},
        }

    def _begin_item(self, part: Part) -> list[ServerSentEvent]:
        match part.kind:
            case "content":
                block: dict[str, Any] = {"type": "text", "text": ""}
            case "reasoning":
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.text, "input": {}}
        self._items.append(block)
        self._pieces = []
        return [event("content_block_start", index=self._index, content_block={**block})]

    def _append(self, text: str) -> list[ServerSentEvent]:
        kind = self._item["type"]
        if kind == "thinking" and self._omits_thinking:
            return []
        self._pieces.append(text)
        return [self._delta({"type": DELTAS[kind], FIELDS[kind]: text})]

    def _end_item(self, is_whole: bool) -> list[ServerSentEvent]:
        block, text, events = self._item, "".join(self._pieces), []
        if block["type"] == "tool_use":
            block["input"] = parse_arguments(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        return [*events, event("content_block_stop", index=self._index)]

    def _delta(self, delta: dict[str, Any]) -> ServerSentEvent:
        return event("content_block_delta", index=self._index, delta=delta)


def event(event_type: str, **fields: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": event_type, **fields}, name=event_type)


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
