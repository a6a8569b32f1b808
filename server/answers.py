"""From token events to what clients read: JSON bodies and SSE chunks of both endpoints, and exact usage counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from server.engine import Engine, EngineError
from server.errors import from_engine
from server.messages import Request, TokenEvent
from server.metrics import Metrics

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How one endpoint writes its answers."""

    object: str
    chunk_object: str
    prefix: str  # of the answer's id

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice, before any text."""

    def delta(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A later chunk's choice."""

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A choice of the whole answer."""


class ChatShape:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": finish}

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}


class CompletionShape:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    prefix = "cmpl-"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return self.choice(index, text, finish)

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


@dataclass
class Usage:
    """What an answer has cost so far, in tokens and steps."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def add(self, event: TokenEvent) -> None:
        self.completion_tokens += len(event.tokens)
        if event.step is not None:
            self.steps += 1
            self.drafted.update(event.step.drafted)
            self.accepted.update(event.step.accepted)

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": self.accepted["prediction"],
                "rejected_prediction_tokens": self.drafted["prediction"] - self.accepted["prediction"],
            },
        }

    def report(self) -> dict[str, Any]:
        """The `speculation` block."""
        return {
            "steps": self.steps,
            "mean_tokens_per_step": round(self.completion_tokens / max(1, self.steps), 4),
            "drafted_tokens": dict(self.drafted),
            "accepted_tokens": dict(self.accepted),
        }


@dataclass(frozen=True)
class Asked:
    """One HTTP request on its way: what the engine is asked for, and how the answer shall look."""

    id: str
    model: str
    shape: Shape
    requests: Sequence[Request]  # one per prompt; their choices are numbered through
    include_usage: bool
    report: bool
    arrived: float  # time.monotonic()


class Answerer:
    """Runs requests on the engine and writes the answers."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def whole(self, asked: Asked) -> dict[str, Any]:
        """The answer as one JSON body. Raises EngineError."""
        texts: dict[int, str] = {}
        finishes: dict[int, str | None] = {}
        usage = Usage()
        async with aclosing(self._events(asked, usage)) as events:
            async for event in events:
                if event is None:
                    continue
                texts[event.choice] = texts.get(event.choice, "") + event.text
                finishes[event.choice] = event.finish
        choices = [asked.shape.choice(i, texts[i], finishes[i]) for i in sorted(texts)]
        body = self._head(asked, asked.shape.object) | {"choices": choices, "usage": usage.body()}
        return body | {"speculation": usage.report()} if asked.report else body

    async def stream(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; an error after the first byte becomes an event, too."""
        head = self._head(asked, asked.shape.chunk_object)
        if asked.include_usage:
            head["usage"] = None
        usage = Usage()
        opened: set[int] = set()
        try:
            async with aclosing(self._events(asked, usage)) as events:
                async for event in events:
                    if event is None:
                        yield KEEP_ALIVE
                        continue
                    opening = asked.shape.opening(event.choice)
                    if event.choice not in opened and opening is not None:
                        yield sse(head | {"choices": [opening]})
                    opened.add(event.choice)
                    if event.text:
                        yield sse(head | {"choices": [asked.shape.delta(event.choice, event.text, None)]})
                    if event.finish is not None:
                        yield sse(head | {"choices": [asked.shape.delta(event.choice, "", event.finish)]})
        except EngineError as error:
            yield sse(from_engine(error).body)
            return
        if asked.include_usage or asked.report:
            last: dict[str, Any] = head | {"choices": []}
            if asked.include_usage:
                last["usage"] = usage.body()
            yield sse(last | {"speculation": usage.report()} if asked.report else last)
        yield DONE

    def _head(self, asked: Asked, kind: str) -> dict[str, Any]:
        return {"id": asked.id, "object": kind, "created": int(time.time()), "model": asked.model, "system_fingerprint": None}

    async def _events(self, asked: Asked, usage: Usage) -> AsyncGenerator[TokenEvent | None, None]:
        """All prompts' events in order, counted on the way; None = nothing for the keep-alive time."""
        last_token = asked.arrived
        for number, request in enumerate(asked.requests):
            cached: int | None = None
            async with aclosing(self._engine.generate(request, admitted=number > 0)) as events:
                async for event in events:
                    if event is None:
                        yield None
                        continue
                    if cached is None:
                        usage.prompt_tokens += len(request.prompt)
                        self._metrics.prompt_tokens.inc(len(request.prompt))
                        cached = event.cached_tokens
                        usage.cached_tokens += cached
                        self._metrics.cached_prompt_tokens.inc(cached)
                    now = time.monotonic()
                    self._time_tokens(usage.completion_tokens == 0, now - last_token, len(event.tokens))
                    last_token = now
                    usage.add(event)
                    if event.step is not None:
                        self._metrics.saw_step(event.step, len(event.tokens))
                    yield msgspec.structs.replace(event, choice=number * request.choices + event.choice)
        self._metrics.request_duration.observe(time.monotonic() - asked.arrived)

    def _time_tokens(self, first: bool, seconds: float, tokens: int) -> None:
        if first:
            self._metrics.time_to_first_token.observe(seconds)
            return
        for _ in range(tokens):
            self._metrics.inter_token_latency.observe(seconds / tokens)


def sse(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
