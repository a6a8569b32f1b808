"""/v1/responses: the endpoint, and the format of a response: an object, and the events that build it.

What is stored is decoded in its principal's turn, like a body of its size.
"""

import time
import uuid
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from outrider.server.chat.tools import Part, ToolParser
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.http.sse import ServerSentEvent
from outrider.server.openai.chat import ChatEndpoint
from outrider.server.openai.chat_formatter import new_call_id
from outrider.server.openai.conversation import AnyToolCall, Message
from outrider.server.openai.fields import MAX_ENTRIES
from outrider.server.openai.generation import NUMBER_BYTES, ChoiceOutput, GenerationRunner, GenerationTask
from outrider.server.openai.logprobs import content_logprobs
from outrider.server.openai.output_parser import ItemsFormatter
from outrider.server.openai.responses.items import CallItem, CustomCallItem, input_item, references, to_messages
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.responses.store import ResponseStore, StoredResponse
from outrider.server.openai.responses.tools import CustomTool, FunctionTool, HostedTool, NamespaceTool, namespaces, own_tools
from outrider.server.openai.tools.custom_input import CustomPart
from outrider.server.openai.usage import Usage
from outrider.verify.sampling_params import SamplingParams


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
            return [*(previous.messages if previous else ()), *to_messages(body.input, stored)]

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


# Maps each type of call to the field that grows and the name of its events.
CALLS = {"function_call": ("arguments", "function_call_arguments"), "custom_tool_call": ("input", "custom_tool_call_input")}


class ResponseFormatter(ItemsFormatter):
    """Writes a response object, with its output items, and its events."""

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
        response = new_response(request, response_id, params)
        super().__init__(response, response["output"], new_parser, custom_tools)
        self._namespaces = namespaces(request.tools)
        self._vocabulary = logprobs_vocabulary
        self._sequence_number = 0  # number of the next event
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not written yet
        self._finish: str | None = None

    def start(self) -> list[ServerSentEvent]:
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        events = list[ServerSentEvent]()
        for each in output.split() if self._vocabulary else (output,):
            self._finish = each.finish
            self._logprobs += content_logprobs(self._vocabulary, each) if self._vocabulary else []
            events += self._write(self._parser.parse(each))
        return events

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        complete = self._finish == "stop"
        status = "completed" if complete else "incomplete"
        # A last token may have no text of its own.
        events = self._append("") if self._logprobs and self._open == "content" else []
        events += self._close(complete)
        if not self._items:
            events += self._begin_item(Part("content", "")) + self._end_item(complete)
        self.answer["status"] = status
        self.answer["incomplete_details"] = None if complete else {"reason": "max_output_tokens"}
        self.answer["usage"] = usage.response_body(self._parser.reasoning_tokens)
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def error(self, error: APIError) -> list[ServerSentEvent]:
        self.answer["status"] = "failed"
        self.answer["error"] = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self._snapshot())]

    def message(self) -> Message:
        texts = {"message": "", "reasoning": ""}
        calls: list[AnyToolCall] = []
        for item in self._items:
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

    def _begin_item(self, part: Part) -> list[ServerSentEvent]:
        if part.kind == "call":  # those of its markers are of no text
            self._logprobs = []
        prefix, item = self._new_item(part)
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        snapshot = {**self._item, **({"content": []} if "content" in item else {})}
        return [self._event("response.output_item.added", output_index=self._index, item=snapshot)]

    def _new_item(self, part: Part) -> tuple[str, dict[str, Any]]:
        """The prefix of the item's id, and the item that a part begins."""
        match part.kind:
            case "content":
                return "msg", {"type": "message", "role": "assistant", "content": []}
            case "reasoning":
                return "rs", {"type": "reasoning", "summary": [], "content": []}
        kind, prefix = ("custom_tool_call", "ctc") if isinstance(part, CustomPart) else ("function_call", "fc")
        namespace, name = self._namespaces.get(part.text, (None, part.text))
        group = {} if namespace is None else {"namespace": namespace}
        return prefix, {"type": kind, "call_id": new_call_id(), **group, "name": name, CALLS[kind][0]: ""}

    def _append(self, text: str) -> list[ServerSentEvent]:
        item, position, events = self._item, self._position, list[ServerSentEvent]()
        logprobs, self._logprobs = self._logprobs, []
        if item["type"] in CALLS:
            field, event = CALLS[item["type"]]
            item[field] += text
            return [self._event(f"response.{event}.delta", **position, delta=text)]
        is_message = item["type"] == "message"
        name = "output_text" if is_message else "reasoning_text"
        if not item["content"]:
            extra: dict[str, Any] = {"annotations": [], "logprobs": []} if is_message else {}
            item["content"].append({"type": name, "text": "", **extra})
            events.append(self._event("response.content_part.added", **position, part=deepcopy(item["content"][0])))
        content = item["content"][0]
        content["text"] += text
        delta: dict[str, Any] = {"delta": text}
        if is_message:
            content["logprobs"] += logprobs
            delta["logprobs"] = logprobs
        return [*events, self._event(f"response.{name}.delta", **position, **delta)]

    def _end_item(self, is_whole: bool) -> list[ServerSentEvent]:
        item, position, events = self._item, self._position, list[ServerSentEvent]()
        item["status"] = "completed" if is_whole else "incomplete"
        if item["type"] in CALLS:
            field, event = CALLS[item["type"]]
            events.append(self._event(f"response.{event}.done", **position, name=item["name"], **{field: item[field]}))
        elif item["content"]:
            [part] = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            events.append(self._event(f"response.{part['type']}.done", **position, text=part["text"], **logprobs))
            events.append(self._event("response.content_part.done", **position, part={**part}))
        return [*events, self._event("response.output_item.done", output_index=self._index, item={**item})]

    @property
    def _position(self) -> dict[str, Any]:
        """The fields that identify the last item in events, and its only content if it has any."""
        content = {} if self._item["type"] in CALLS else {"content_index": 0}
        return {"item_id": self._item["id"], "output_index": self._index, **content}

    def _event(self, event_type: str, **fields: Any) -> ServerSentEvent:
        self._sequence_number += 1
        data = {"type": event_type, "sequence_number": self._sequence_number - 1, **fields}
        return ServerSentEvent(data, name=event_type, padded=event_type.endswith(".delta"))

    def _snapshot(self) -> dict[str, Any]:
        return {**self.answer, "output": [{**item} for item in self._items]}


def new_response(request: ResponsesBody, response_id: str, params: SamplingParams) -> dict[str, Any]:
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
    missing = {"parameters": None, "strict": False} if isinstance(tool, FunctionTool) else {}
    return {**missing, **tool.model_dump(exclude_none=True)}
