"""The format of answers of /v1/messages: a message, and the events that build it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from outrider.server.anthropic.schema import MessagesBody
from outrider.server.chat.tools import Part, ToolParser
from outrider.server.http.errors import APIError
from outrider.server.http.sse import ServerSentEvent
from outrider.server.openai.conversation import parse_arguments
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.output_parser import ItemsFormatter
from outrider.server.openai.usage import Usage

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
    """An event of a stream."""
    return ServerSentEvent({"type": event_type, **fields}, name=event_type)
