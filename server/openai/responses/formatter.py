"""The format of a response: an object, and the events that build it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from outrider.server.chat.tools import Part, ToolParser
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.http.errors import APIError
from outrider.server.http.sse import ServerSentEvent
from outrider.server.openai.chat import new_call_id
from outrider.server.openai.conversation import AnyToolCall, Message
from outrider.server.openai.fields import MAX_ENTRIES
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.logprobs import content_logprobs
from outrider.server.openai.output_parser import OutputParser
from outrider.server.openai.responses.items import CallItem, CustomCallItem
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.responses.tools import CustomTool, FunctionTool, HostedTool, NamespaceTool, namespaces, own_tools
from outrider.server.openai.tools.custom_input import CustomPart
from outrider.server.openai.usage import Usage
from outrider.verify.sampling_params import SamplingParams

# Maps each type of call to the field that grows and the name of its events.
CALLS = {"function_call": ("arguments", "function_call_arguments"), "custom_tool_call": ("input", "custom_tool_call_input")}


class ResponseFormatter:
    """Writes a response object and its events."""

    def __init__(
        self,
        request: ResponsesBody,
        response_id: str,
        params: SamplingParams,
        new_parser: Callable[[], ToolParser],
        logprobs_vocabulary: Vocabulary | None = None,
    ) -> None:
        """`params` are the response's. Writes log-probabilities if `logprobs_vocabulary` is given."""
        custom_tools = [tool.name for tool in own_tools(request.tools) if isinstance(tool, CustomTool)]
        self._parser = OutputParser(new_parser, custom_tools)
        self._namespaces = namespaces(request.tools)
        self._vocabulary = logprobs_vocabulary
        self._sequence_number = 0  # number of the next event
        self._item: dict[str, Any] | None = None  # the output item in progress
        self._finish: str | None = None
        self.response = new_response(request, response_id, params)

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> dict[str, Any]:
        for output in outputs:
            for each in output.split():  # so that log-probabilities are added to the item of their text
                self.deltas(each)
        self.end(usage)
        return self.response

    def start(self) -> list[ServerSentEvent]:
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        self._finish = output.finish
        logprobs = content_logprobs(self._vocabulary, output) if self._vocabulary else []
        events: list[ServerSentEvent] = []
        for part in self._parser.parse(output):
            if part.kind == "call":
                events += self._close_item("completed") + self._open_item(*self._new_call(part))
            else:
                events += self._append(part, logprobs)
                logprobs = []  # all of them are in the first delta
        return events

    def heartbeat(self) -> None:
        return None

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        complete = self._finish == "stop"
        status = "completed" if complete else "incomplete"
        events = self._close_item(status)
        if not self.response["output"]:
            events += self._open_item(new_item("content"), "msg") + self._close_item(status)
        self.response["status"] = status
        self.response["incomplete_details"] = None if complete else {"reason": "max_output_tokens"}
        self.response["usage"] = usage.response_body(self._parser.reasoning_tokens)
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def error(self, error: APIError) -> list[ServerSentEvent]:
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self._snapshot())]

    def message(self) -> Message:
        """The answer as a message of the conversation."""
        texts = {"message": "", "reasoning": ""}
        calls: list[AnyToolCall] = []
        for item in self.response["output"]:
            if item["type"] in texts:
                texts[item["type"]] += "".join(part["text"] for part in item["content"])
            else:
                calls.append((CallItem if item["type"] == "function_call" else CustomCallItem).model_validate(item).to_chat())
        return Message(
            role="assistant",
            content=texts["message"],
            reasoning_content=texts["reasoning"] or None,
            tool_calls=calls[:MAX_ENTRIES] or None,
        )

    def _append(self, part: Part, logprobs: list[dict[str, Any]]) -> list[ServerSentEvent]:
        """Appends text or arguments to the item in progress; opens an item if that one has another type."""
        events: list[ServerSentEvent] = []
        if part.kind != "arguments":
            item = new_item(part.kind)
            if self._item is None or self._item["type"] != item["type"]:
                prefix = "msg" if part.kind == "content" else "rs"
                events += self._close_item("completed") + self._open_item(item, prefix)
        item, position = self._current()
        if item["type"] in CALLS:
            field, event = CALLS[item["type"]]
            item[field] += part.text
            return [self._event(f"response.{event}.delta", **position, delta=part.text)]
        position["content_index"] = 0
        is_message = item["type"] == "message"
        name = "output_text" if is_message else "reasoning_text"
        if not item["content"]:
            extra: dict[str, Any] = {"annotations": [], "logprobs": []} if is_message else {}
            item["content"].append({"type": name, "text": "", **extra})
            events.append(self._event("response.content_part.added", **position, part={**item["content"][0]}))
        content = item["content"][0]
        content["text"] += part.text
        delta: dict[str, Any] = {"delta": part.text}
        if is_message:
            content["logprobs"] += logprobs
            delta["logprobs"] = logprobs
        return [*events, self._event(f"response.{name}.delta", **position, **delta)]

    def _open_item(self, item: dict[str, Any], id_prefix: str) -> list[ServerSentEvent]:
        self._item = {"id": f"{id_prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self.response["output"].append(self._item)
        snapshot = {**self._item, **({"content": []} if "content" in self._item else {})}
        index = len(self.response["output"]) - 1
        return [self._event("response.output_item.added", output_index=index, item=snapshot)]

    def _new_call(self, part: Part) -> tuple[dict[str, Any], str]:
        """A new output item of a call, and the prefix of its id."""
        kind, prefix = ("custom_tool_call", "ctc") if isinstance(part, CustomPart) else ("function_call", "fc")
        namespace, name = self._namespaces.get(part.text, (None, part.text))
        group = {} if namespace is None else {"namespace": namespace}
        return {"type": kind, "call_id": new_call_id(), **group, "name": name, CALLS[kind][0]: ""}, prefix

    def _close_item(self, status: str) -> list[ServerSentEvent]:
        if self._item is None:
            return []
        item, position = self._current()
        item["status"] = status
        events = []
        if item["type"] in CALLS:
            field, event = CALLS[item["type"]]
            done = {"name": item["name"], field: item[field]}
            events.append(self._event(f"response.{event}.done", **position, **done))
        elif item["content"]:
            position["content_index"] = 0
            [part] = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            events.append(self._event(f"response.{part['type']}.done", **position, text=part["text"], **logprobs))
            events.append(self._event("response.content_part.done", **position, part={**part}))
        index = position["output_index"]
        events.append(self._event("response.output_item.done", output_index=index, item={**item}))
        self._item = None
        return events

    def _current(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The item in progress, and the fields that identify it in events."""
        assert self._item is not None
        return self._item, {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}

    def _event(self, event_type: str, **fields: Any) -> ServerSentEvent:
        self._sequence_number += 1
        data = {"type": event_type, "sequence_number": self._sequence_number - 1, **fields}
        return ServerSentEvent(data, name=event_type, padded=event_type.endswith(".delta"))

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [{**item} for item in self.response["output"]]}


def new_item(kind: str) -> dict[str, Any]:
    """An empty output item for content or reasoning."""
    extra: dict[str, Any] = {"role": "assistant"} if kind == "content" else {"summary": []}
    return {"type": "message" if kind == "content" else "reasoning", **extra, "content": []}


def new_response(request: ResponsesBody, response_id: str, params: SamplingParams) -> dict[str, Any]:
    """A response without output."""
    choice, reasoning, text = request.tool_choice, request.reasoning, request.text
    optional = ("max_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "user")
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "store": request.stores,
        "temperature": params.temperature,
        "text": {
            "format": request.text_format.model_dump(by_alias=True, exclude_none=True),
            **({"verbosity": text.verbosity} if text and text.verbosity else {}),
        },
        "tool_choice": choice or "auto" if isinstance(choice, str | None) else choice.model_dump(exclude_none=True),
        "tools": [echoed(tool) for tool in request.tools or () if not isinstance(tool, HostedTool)],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "metadata": request.metadata or {},
        **{name: getattr(request, name) for name in optional if getattr(request, name) is not None},
    }


def echoed(tool: FunctionTool | CustomTool | NamespaceTool) -> dict[str, Any]:
    """A tool in the response."""
    missing = {"parameters": None, "strict": False} if isinstance(tool, FunctionTool) else {}
    return {**missing, **tool.model_dump(exclude_none=True)}
