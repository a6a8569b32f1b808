"""From token events to what clients read: JSON bodies and SSE chunks of both endpoints, and exact usage counts."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import groupby
from typing import Any

import msgspec

from server.engine.engine import Engine, EngineError
from server.engine.messages import Request, TokenEvent, TokenLogprobs
from server.http.coalesce import by_clock, one_by_one
from server.http.errors import from_engine
from server.openai.formatters import ChoiceOutput, Formatter
from server.telemetry.metrics import Metrics

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
PADDED_BYTES = 256
PADDED_TICK_BYTES = 2048  # where a packet holds whatever came in a while
FINGERPRINT = f"outrider-{version('outrider')}"


@dataclass
class Usage:
    """What an answer has cost so far, in tokens and steps."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
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
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": self.accepted["prediction"],
                "rejected_prediction_tokens": self.drafted["prediction"] - self.accepted["prediction"],
            },
        }

    def response_body(self) -> dict[str, Any]:
        """The usage object of /v1/responses."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
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
class GenerationTask:
    """One HTTP request on its way: what the engine is asked for, and how the answer shall look."""

    id: str
    model: str
    shape: Formatter
    requests: Sequence[Request]  # one per prompt; their choices are numbered through
    arrived: float  # time.monotonic()
    include_usage: bool = False
    report: bool = False
    best: int | None = None  # of each request's choices, so many are returned; None = all
    echoes: Sequence[str] = ()  # the prompts' texts, where choices begin with them
    token_ids: bool = False  # choices show their tokens
    logprobs: bool = False  # choices show their log-probabilities
    obfuscates: bool = False  # chunks are padded
    spent: dict[str, float] = field(default_factory=dict)  # for logs and traces: times and counts, filled in on the way

    def shown(self, piece: ChoiceOutput) -> ChoiceOutput:
        """The piece with what the client wants to see."""
        return replace(piece, logprobs=piece.logprobs if self.logprobs else None, shows_tokens=self.token_ids)


class Answerer:
    """Runs requests on the engine and writes the answers."""

    def __init__(self, engine: Engine, metrics: Metrics, coalesce_seconds: float = 0.0) -> None:
        """With `coalesce_seconds`, streams go by a clock."""
        self._engine = engine
        self._metrics = metrics
        self._tick = coalesce_seconds

    async def whole(self, asked: GenerationTask) -> dict[str, Any]:
        """The answer as one JSON body. Raises EngineError."""
        pieces: dict[int, ChoiceOutput] = {}
        usage = Usage()
        async with aclosing(self.events(asked, usage)) as events:
            async for event in events:
                if event is not None:
                    pieces.setdefault(event.choice, first(asked, event)).add(event)
        kept = best_of(asked, [pieces[index] for index in sorted(pieces)])
        choices = [asked.shape.choice(asked.shown(piece)) for piece in kept]
        usage.reasoning_tokens = asked.shape.reasoning_tokens
        body = self._head(asked, asked.shape.object) | {"choices": choices, "usage": usage.body()}
        return body | {"speculation": usage.report()} if asked.report else body

    async def stream(self, asked: GenerationTask) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Raises EngineError before the first byte; after it an error becomes an event."""
        head = self._head(asked, asked.shape.chunk_object)
        if asked.include_usage:
            head["usage"] = None
        usage = Usage()
        offsets: dict[int, int] = {}  # characters sent of each choice that has begun
        begun = False  # something has been said
        padding = self.padding(asked)
        try:
            async with aclosing(self.batches(asked, usage)) as batches:
                async for batch in batches:
                    begun = True
                    if not batch:
                        nothing = head | {"choices": []}
                        yield sse(padded(nothing, padding)) if padding and offsets else KEEP_ALIVE
                    for piece in pieces(asked, batch, offsets):
                        opening = asked.shape.opening(piece.index)
                        if piece.index not in offsets and opening is not None:
                            yield sse(head | {"choices": [opening]})
                        offsets[piece.index] = piece.offset + len(piece.text)
                        for choice in asked.shape.deltas(asked.shown(piece)):
                            chunk = head | {"choices": [choice]}
                            yield sse(padded(chunk, padding) if padding else chunk)
        except EngineError as error:
            if not begun:
                raise
            yield sse(from_engine(error).body)
            return
        if asked.include_usage or asked.report:
            usage.reasoning_tokens = asked.shape.reasoning_tokens
            last: dict[str, Any] = head | {"choices": []}
            if asked.include_usage:
                last["usage"] = usage.body()
            yield sse(last | {"speculation": usage.report()} if asked.report else last)
        yield DONE

    def _head(self, asked: GenerationTask, kind: str) -> dict[str, Any]:
        return {
            "id": asked.id,
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": FINGERPRINT,
        }

    def padding(self, asked: GenerationTask) -> int:
        """The stream's packets with text are a multiple of so many bytes long; 0 = as long as they come."""
        if not asked.obfuscates:
            return 0
        return PADDED_TICK_BYTES if self._tick else PADDED_BYTES

    def batches(self, asked: GenerationTask, usage: Usage) -> AsyncGenerator[list[TokenEvent], None]:
        """The events as a stream sends them: one by one, or by the clock; an empty list = nothing has come for a while."""
        events = self.events(asked, usage)
        return by_clock(events, self._tick) if self._tick else one_by_one(events)

    async def events(self, asked: GenerationTask, usage: Usage) -> AsyncGenerator[TokenEvent | None, None]:
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
                    asked.spent.setdefault("first_token_ms", round(1e3 * (now - asked.arrived), 1))
                    self._time_tokens(usage.completion_tokens == 0, now - last_token, len(event.tokens))
                    last_token = now
                    usage.add(event)
                    asked.spent.update(completion_tokens=usage.completion_tokens, steps=usage.steps)
                    if event.step is not None:
                        self._metrics.record_step(event.step, len(event.tokens))
                    yield msgspec.structs.replace(event, choice=number * request.choices + event.choice)
        self._metrics.request_duration.observe(time.monotonic() - asked.arrived)

    def _time_tokens(self, first: bool, seconds: float, tokens: int) -> None:
        if first:
            self._metrics.time_to_first_token.observe(seconds)
            return
        for _ in range(tokens):
            self._metrics.inter_token_latency.observe(seconds / tokens)


def first(asked: GenerationTask, event: TokenEvent) -> ChoiceOutput:
    """What the choice of its first event begins with: nothing, or the prompt."""
    if not asked.echoes:
        return ChoiceOutput(event.choice)
    number = event.choice // asked.requests[0].choices
    echo, tokens, known = asked.echoes[number], asked.requests[number].prompt, event.prompt_logprobs
    if known is not None:  # the first token's place is empty
        known = TokenLogprobs([0.0, *known.chosen], [[], *known.ids], [[], *known.values])
    return ChoiceOutput(event.choice, echo, tokens=list(tokens), logprobs=known, pieces=[(echo, 0)], echoed=len(tokens))


def pieces(asked: GenerationTask, batch: Sequence[TokenEvent], offsets: Mapping[int, int]) -> Iterator[ChoiceOutput]:
    """Events in a row as one piece of each choice; `offsets` of those that have begun."""
    for index, events in groupby(batch, key=lambda event: event.choice):
        each = list(events)
        piece = ChoiceOutput(index, offset=offsets[index]) if index in offsets else first(asked, each[0])
        for event in each:
            piece.add(event)
        yield piece


def padded(chunk: dict[str, Any], multiple: int) -> dict[str, Any]:
    """The chunk with random text that makes it a multiple of so many bytes long."""
    size = len(msgspec.json.encode(chunk)) + len(',"obfuscation":""')
    return chunk | {"obfuscation": secrets.token_hex(multiple)[: -size % multiple]}


def best_of(asked: GenerationTask, pieces: list[ChoiceOutput]) -> list[ChoiceOutput]:
    """Of each request's choices those with the highest log-probability per token, numbered anew."""
    if asked.best is None:
        return pieces
    size = asked.requests[0].choices
    kept: list[ChoiceOutput] = []
    for start in range(0, len(pieces), size):
        group = sorted(pieces[start : start + size], key=lambda piece: -piece.mean_logprob)
        kept += group[: asked.best]
    for index, piece in enumerate(kept):
        piece.index = index
    return kept


def sse(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
