"""What /v1/responses sends of an answer: the response's object, and the events by which it grows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from server.chat.reasoning_parser import ReasoningParser
from server.chat.tool_parsers import Part
from server.openai.conversation import CalledFunction, Message, ToolCall
from server.openai.responses import ChosenTool, ResponsesBody, TextFormat


class ResponseWriter:
    """Makes a response's object and its events of an answer's parts."""

    def __init__(self, body: ResponsesBody, identity: str, reader: ReasoningParser) -> None:
        self._reader = reader
        self._number = 0
        self._item: dict[str, Any] | None = None  # the output item that is growing
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, ChosenTool) else body.tool_choice or "auto"
        format = body.text.format if body.text and body.text.format else TextFormat(type="text")
        self.response: dict[str, Any] = {
            "id": identity,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice,
            "tools": [{"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            **({} if body.user is None else {"user": body.user}),
        }

    def begin(self) -> list[dict[str, Any]]:
        """The first events."""
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def take(self, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Some more of the answer's text, and of its tokens' log-probabilities."""
        return self._write(self._reader.feed(text), logprobs)

    def end(self, finish: str | None, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The last events."""
        events = self._write(self._reader.finish(), [])
        status = "completed" if finish == "stop" else "incomplete"
        events += self._close(status)
        if not self.response["output"]:
            events += self._open({"type": "message", "role": "assistant", "content": []}, "msg") + self._close(status)
        self.response["status"] = status
        self.response["incomplete_details"] = None if finish == "stop" else {"reason": "max_output_tokens"}
        self.response["usage"] = usage
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def fail(self, message: str) -> list[dict[str, Any]]:
        """The last event of an answer that cannot be finished."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": message}
        return [self._event("response.failed", response=self._snapshot())]

    @property
    def messages(self) -> list[Message]:
        """The answer as the conversation goes on from it."""
        text = "".join(
            part["text"] for item in self.response["output"] if item["type"] == "message" for part in item["content"]
        )
        calls = [
            ToolCall(id=item["call_id"], function=CalledFunction(name=item["name"], arguments=item["arguments"]))
            for item in self.response["output"]
            if item["type"] == "function_call"
        ]
        return [Message(role="assistant", content=text, tool_calls=calls or None)]

    def _write(self, parts: Sequence[Part], logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            kind = {"content": "message", "reasoning": "reasoning"}.get(part.kind, "function_call")
            if part.kind == "call":
                item = {"type": kind, "call_id": f"call_{uuid.uuid4().hex[:24]}", "name": part.text, "arguments": ""}
                events += self._close("completed") + self._open(item, "fc")
                continue
            if self._item is None or self._item["type"] != kind:
                events += self._close("completed")
                new = {"type": kind, "role": "assistant"} if kind == "message" else {"type": kind, "summary": []}
                events += self._open({**new, "content": []}, "msg" if kind == "message" else "rs")
            events += self._grow(part.text, logprobs)
            logprobs = []
        return events

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        item = self._item
        assert item is not None
        if item["type"] == "function_call":
            item["arguments"] += text
            return [self._event("response.function_call_arguments.delta", **self._place(), delta=text)]
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        events = []
        if not item["content"]:
            extra: dict[str, Any] = {"annotations": [], "logprobs": []} if name == "output_text" else {}
            item["content"].append({"type": name, "text": "", **extra})
            part = {**item["content"][0]}
            events.append(self._event("response.content_part.added", **self._place(), content_index=0, part=part))
        item["content"][0]["text"] += text
        told = {}
        if name == "output_text":
            item["content"][0]["logprobs"] += logprobs
            told["logprobs"] = logprobs
        events.append(self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text, **told))
        return events

    def _open(self, item: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self.response["output"].append(self._item)
        place = self._place()
        shown = {**self._item, **({"content": []} if "content" in self._item else {})}
        return [self._event("response.output_item.added", output_index=place["output_index"], item=shown)]

    def _close(self, status: str) -> list[dict[str, Any]]:
        item, place = self._item, self._place()
        if item is None:
            return []
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **place, **done))
        elif item["content"]:
            [part] = item["content"]
            told = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            events.append(self._event(f"response.{part['type']}.done", **place, content_index=0, text=part["text"], **told))
            events.append(self._event("response.content_part.done", **place, content_index=0, part={**part}))
        events.append(self._event("response.output_item.done", output_index=place["output_index"], item={**item}))
        self._item = None
        return events

    def _place(self) -> dict[str, Any]:
        item = self._item
        return {"item_id": item["id"] if item else "", "output_index": len(self.response["output"]) - 1}

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [{**item} for item in self.response["output"]]}
