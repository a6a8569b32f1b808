"""The format of Ollama's answers: one object, or a stream of one object per line, of which the last one has the times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from outrider.server.chat.tools import ToolParser
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.http.errors import APIError
from outrider.server.http.sse import ServerSentEvent
from outrider.server.ollama.schema import AnswerBody
from outrider.server.openai.chat_formatter import new_call_id
from outrider.server.openai.conversation import parse_arguments
from outrider.server.openai.generation import ChoiceOutput, Formatter
from outrider.server.openai.logprobs import content_logprobs
from outrider.server.openai.output_parser import OutputParser
from outrider.server.openai.usage import Usage

MEDIA_TYPE = "application/x-ndjson"


class JSONLine(ServerSentEvent):
    """A line of a stream, in the place of an event."""

    def encode(self, multiple_bytes: int = 0) -> bytes:
        return msgspec.json.encode(self.data) + b"\n"


@dataclass(frozen=True)
class Times:
    """When a request reached its stages, as time.monotonic()."""

    dispatched: float  # it was passed to its model
    arrived: float  # the model's application got it
    ready: float  # the model was in memory


@dataclass
class Piece:
    """What one output adds to the answer."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None


class AnswerFormatter(Formatter):
    """Writes the answer to one request."""

    def __init__(
        self,
        body: AnswerBody,
        vocabulary: Vocabulary,
        new_parser: Callable[[], ToolParser],
        times: Times,
        stats: Mapping[str, Any],
    ) -> None:
        """`stats` are those of the task that runs the request."""
        self._body = body
        self._vocabulary = vocabulary
        self._parser = OutputParser(new_parser)
        self._times = times
        self._stats = stats
        self._calls: list[tuple[str, list[str]]] = []  # each call's name, and the text of its arguments
        self._written_calls = 0
        self._reason = "stop"

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> dict[str, Any]:
        return self._last(self._read(outputs[0]), usage)

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        piece = self._read(output)
        return [JSONLine(answer(self._body, piece))] if piece != Piece() else []

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        return [JSONLine(self._last(Piece(), usage))]

    def error(self, error: APIError) -> list[ServerSentEvent]:
        return [JSONLine({"error": error.message})]

    def _read(self, output: ChoiceOutput) -> Piece:
        """What the output adds. A call is written when it is whole: its arguments are an object."""
        piece = Piece()
        for part in self._parser.parse(output):
            match part.kind:
                case "content":
                    piece.text += part.text
                case "reasoning":
                    piece.thinking += part.text
                case "call":
                    self._calls.append((part.text, []))
                case "arguments":
                    self._calls[part.call][1].append(part.text)
        whole = len(self._calls) - (output.finish is None)
        for number, (name, arguments) in enumerate(self._calls[self._written_calls : whole], self._written_calls):
            function = {"index": number, "name": name, "arguments": parse_arguments("".join(arguments))}
            piece.calls.append({"id": new_call_id(), "function": function})
        self._written_calls = max(self._written_calls, whole)
        if output.logprobs is not None and output.logprobs.chosen and self._body.logprobs:
            piece.logprobs = content_logprobs(self._vocabulary, output)
        if output.finish is not None:
            self._reason = output.finish
        return piece

    def _last(self, piece: Piece, usage: Usage) -> dict[str, Any]:
        """The last object of an answer, or the only one. Times are in nanoseconds."""
        now, times = time.monotonic(), self._times
        first = min(now, times.arrived + self._stats.get("first_token_ms", 0.0) / 1e3)
        return answer(self._body, piece) | {
            "done": True,
            "done_reason": self._reason,
            "total_duration": nanoseconds(now - times.dispatched),
            "load_duration": nanoseconds(times.ready - times.dispatched),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - times.ready),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(now - first),
        }


def answer(body: AnswerBody, piece: Piece) -> dict[str, Any]:
    """A piece of an answer as an object: a chat's message, or the text of what /api/generate writes."""
    thinking = {"thinking": piece.thinking} if piece.thinking else {}
    calls = {"tool_calls": piece.calls} if piece.calls else {}
    message: dict[str, Any] = {"response": piece.text, **thinking}
    if body.is_chat:
        message = {"message": {"role": "assistant", "content": piece.text, **thinking, **calls}}
    logprobs = {} if piece.logprobs is None else {"logprobs": piece.logprobs}
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": body.model_name, "created_at": now, **message, **logprobs, "done": False}


def nanoseconds(seconds: float) -> int:
    """A duration, which is not negative."""
    return max(0, round(1e9 * seconds))
