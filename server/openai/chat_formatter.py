"""The format of chat completions and their chunks."""

import uuid
from collections.abc import Callable
from typing import Any

from outrider.server.chat.tools import Part, ToolParser
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.openai.choices import ChoicesFormatter
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.logprobs import content_logprobs
from outrider.server.openai.output_parser import OutputParser
from outrider.server.openai.schema import ChatBody
from outrider.server.openai.tools.custom_input import CustomPart


class ChatFormatter(ChoicesFormatter):
    """Writes chat completions and their chunks."""

    id_prefix = "chatcmpl-"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request: ChatBody, vocabulary: Vocabulary, new_parser: Callable[[], ToolParser], request_id: str
    ) -> None:
        super().__init__(request, vocabulary, request_id)
        self._names_tool = request.named_tool is not None
        self._parser = OutputParser(new_parser, request.custom_tools)
        self._called: set[int] = set()  # choices with tool calls

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def opening(self, index: int) -> dict[str, Any]:
        return chunk_choice(index, {"role": "assistant", "content": "", "refusal": None})

    def choice_deltas(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        parts = self._parser.parse(output)
        if any(part.kind == "call" for part in parts):
            self._called.add(output.index)
        logprobs, extensions = self._logprobs(output), self._extensions(output)
        deltas = [delta(part) for part in parts] or ([{}] if logprobs or extensions else [])
        choices = [chunk_choice(output.index, each) for each in deltas]
        if choices:
            choices[0] |= {"logprobs": logprobs, **extensions}
        if output.finish is not None:
            reason = self._finish_reason(output.finish, output.index in self._called)
            choices.append(chunk_choice(output.index, {}, reason))
        return choices

    def choice(self, output: ChoiceOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        calls: list[dict[str, Any]] = []
        for part in self._parser.parse(output):
            match part.kind:
                case "content":
                    message["content"] = (message["content"] or "") + part.text
                case "reasoning":
                    message["reasoning_content"] = message.get("reasoning_content", "") + part.text
                case "call":
                    calls.append(new_call(part))
                case "arguments":
                    kind, field = call_fields(part)
                    calls[part.call][kind][field] += part.text
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output.finish, bool(calls)),
            **self._extensions(output),
        }

    def _finish_reason(self, finish: str | None, called: bool) -> str | None:
        """OpenAI's rule: "tool_calls" after a call, unless the request named the tool."""
        return "tool_calls" if finish == "stop" and called and not self._names_tool else finish

    def _logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        if output.logprobs is None or not self._request.returns_logprobs:
            return None
        return {"content": content_logprobs(self._vocabulary, output), "refusal": None}


def chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def delta(part: Part) -> dict[str, Any]:
    """A part of the answer as a chunk's `delta`."""
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            return {"reasoning_content": part.text}
        case "call":
            return {"tool_calls": [{"index": part.call, **new_call(part)}]}
        case "arguments":
            kind, field = call_fields(part)
            return {"tool_calls": [{"index": part.call, kind: {field: part.text}}]}


def new_call(part: Part) -> dict[str, Any]:
    """A tool call without arguments."""
    kind, field = call_fields(part)
    return {"id": new_call_id(), "type": kind, kind: {"name": part.text, field: ""}}


def call_fields(part: Part) -> tuple[str, str]:
    """The type of the call that a part belongs to, and the field that grows."""
    return ("custom", "input") if isinstance(part, CustomPart) else ("function", "arguments")


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
