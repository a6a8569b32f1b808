"""Runs a request on the engine and writes its answer, as one body or as a stream, in any API's format.

Knows nothing about JSON: a `Formatter` turns outputs into bodies and events. Usage, metrics, keep-alives, coalescing, padding
and errors are handled here, once for all endpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec
from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.responses import StreamingResponse
from msgspec.structs import fields, replace

from outrider.drafters.sequence import Finish
from outrider.server.engine.engine import EngineError
from outrider.server.engine.interface import EngineLike
from outrider.server.engine.messages import Request, StepReport, TokenEvent, TokenLogprobs
from outrider.server.http import sse
from outrider.server.http.errors import APIError, from_engine
from outrider.server.http.json_route import in_turn
from outrider.server.http.sse import ServerSentEvent
from outrider.server.openai.usage import Usage
from outrider.server.telemetry.gen_ai import of_request
from outrider.server.telemetry.metrics import Metrics

# About the size of a log-probability and its token as JSON.
NUMBER_BYTES = 32


@dataclass
class ChoiceOutput:
    """New output of one choice, or its complete output. Starts with the prompt if the prompt is echoed."""

    index: int
    finish: Finish | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None  # log-probabilities of `tokens`; a stop token at the end may have none
    stop_string: str | None = None  # the stop string that ended the choice
    echoed_tokens: int = 0  # leading `tokens` that belong to the echoed prompt
    pieces: list[tuple[str, int]] = field(default_factory=list)  # text and number of tokens of each event
    step: StepReport | None = None  # step of the last event

    def add(self, event: TokenEvent) -> None:
        self.pieces.append((event.text, len(event.tokens)))
        self.finish, self.stop_string, self.step = event.finish, event.stop_string, event.step
        self.tokens += event.tokens
        if event.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = TokenLogprobs([], [], [])
            for scores in fields(TokenLogprobs):
                getattr(self.logprobs, scores.name).extend(getattr(event.logprobs, scores.name))

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def size_bytes(self) -> int:
        """The size of the output as JSON, about."""
        logprobs = self.logprobs or TokenLogprobs([], [], [])
        return len(self.text) + NUMBER_BYTES * (len(logprobs.chosen) + sum(map(len, logprobs.ids)))

    def split(self) -> Iterator[ChoiceOutput]:
        """Splits the output into one output per event."""
        start = 0
        for number, (text, size) in enumerate(self.pieces, start=1):
            part, scores = slice(start, start + size), self.logprobs
            yield ChoiceOutput(
                self.index,
                finish=self.finish if number == len(self.pieces) else None,
                stop_string=self.stop_string if number == len(self.pieces) else None,
                tokens=self.tokens[part],
                logprobs=scores and TokenLogprobs(scores.chosen[part], scores.ids[part], scores.values[part]),
                pieces=[(text, size)],
            )
            start += size

    @property
    def mean_logprob(self) -> float:
        chosen = self.logprobs.chosen[self.echoed_tokens :] if self.logprobs else []
        return sum(chosen) / max(1, len(chosen))


class Formatter(Protocol):
    """Writes one answer in an API's format, and holds the state of that answer.

    For a complete answer, `body` is called; for a stream, `start`, `deltas` for each output, then `end` or `error`.
    """

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> Any:
        """The complete answer as JSON; `outputs` has one element per choice."""

    def start(self) -> list[ServerSentEvent]:
        """The events before the first output."""
        return []

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        """The events of new output."""

    def heartbeat(self) -> ServerSentEvent | None:
        """A padded event without content, with the size of a content event; None if the API has no such event."""
        return None

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        """The last events, after the engine has finished."""

    def error(self, error: APIError) -> list[ServerSentEvent]:
        """The last events of a stream that cannot be completed."""
        return [ServerSentEvent(error.body)]


class Cut(NamedTuple):
    """The end of a choice."""

    characters: int  # characters of the last text that belong to the choice
    finish: Finish


class Stop(Protocol):
    """Ends one choice early, by its text."""

    def feed(self, text: str) -> Cut | None:
        """Takes the choice's next text; returns where in it the choice ends, or None."""


class ChoiceEvent(NamedTuple):
    choice: int
    event: TokenEvent


@dataclass(frozen=True)
class GenerationTask:
    """One HTTP request and the format of its answer."""

    requests: Sequence[Request]  # one per choice: all choices of the first prompt, then those of the next
    formatter: Formatter
    arrived: float  # time.monotonic()
    choices: int = 1  # choices per prompt
    media_type: str = sse.EVENT_STREAM  # of a stream
    keep_alive: bytes = sse.KEEP_ALIVE  # sent after each keep-alive interval without an event
    padded: bool = False  # pad stream events, so that their sizes do not reveal their content
    echoes: Sequence[str] = ()  # text of each prompt, if choices begin with it
    new_stop: Callable[[], Stop] | None = None  # makes what ends a choice early
    on_complete: Callable[[], Awaitable[None]] | None = None  # called after the engine has finished, before the last byte
    stats: dict[str, Any] = field(default_factory=dict)  # times and counts for the request log and traces
    usage: Usage = field(default_factory=Usage)  # usage so far
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by prompt, without its first token


@dataclass(frozen=True)
class GenerationRunner:
    engine: EngineLike
    metrics: Metrics
    tick_seconds: float = 0.0  # > 0 coalesces streams into one batch of events per tick
    keep_alive_seconds: float = math.inf  # a stream whose events have brought no bytes for so long gets a keep-alive
    model: str = ""  # the name of the engine's

    async def respond(self, http: HTTPRequest, task: GenerationTask, stream: bool) -> Response:
        """The HTTP answer. Raises EngineError before the first byte."""
        task.stats["stream"] = stream
        http.state.stats = task.stats
        http.state.gen_ai = of_request(task.requests[0], self.model, task.choices, stream)
        if stream:
            stream_of_events = await sse.start(self.stream(task))
            return StreamingResponse(stream_of_events, media_type=task.media_type, headers=sse.HEADERS)
        outputs = await self._outputs(task)
        size_bytes = sum(output.size_bytes for output in outputs)
        content = await in_turn(http, lambda: msgspec.json.encode(task.formatter.body(outputs, task.usage)), size_bytes)
        if task.on_complete is not None:
            await task.on_complete()
        return Response(content, media_type="application/json")

    async def _outputs(self, task: GenerationTask) -> list[ChoiceOutput]:
        """The complete choices. Raises EngineError."""
        outputs: dict[int, ChoiceOutput] = {}
        async with aclosing(self._events(task)) as events:
            async for item in events:
                if item is not None:
                    if item.choice not in outputs:
                        outputs[item.choice] = new_output(task, item.choice)
                    outputs[item.choice].add(item.event)
        return [outputs[index] for index in sorted(outputs)]

    async def stream(self, task: GenerationTask) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, from its turn on. Raises EngineError before that; later errors become events."""
        formatter, events = task.formatter, self._events(task)
        coalesced = sse.coalesce(events, self.tick_seconds) if self.tick_seconds else sse.singly(events)
        padding_bytes = task.padded * (sse.COALESCED_PADDED_BYTES if self.tick_seconds else sse.PADDED_BYTES)
        begun: set[int] = set()  # choices
        started, sent_at = False, time.monotonic()
        try:
            async with aclosing(coalesced) as batches:
                async for batch in batches:
                    chunks = [] if started else [event.encode() for event in formatter.start()]
                    started = True
                    for output in outputs_of(task, batch, begun):
                        begun.add(output.index)
                        chunks += [event.encode(padding_bytes) for event in formatter.deltas(output)]
                    is_silent = self.tick_seconds or time.monotonic() - sent_at >= self.keep_alive_seconds
                    if not chunks and (is_silent or not batch):
                        heartbeat = formatter.heartbeat() if padding_bytes and begun else None
                        chunks = [heartbeat.encode(padding_bytes) if heartbeat else task.keep_alive]
                    if chunks:
                        sent_at = time.monotonic()
                    for chunk in chunks:
                        yield chunk
        except EngineError as error:
            if not started:
                raise
            for event in formatter.error(from_engine(error)):
                yield event.encode()
            return
        last = formatter.end(task.usage)
        if task.on_complete is not None:
            await task.on_complete()
        for event in last:
            yield event.encode()

    async def _events(self, task: GenerationTask) -> AsyncGenerator[ChoiceEvent | None, None]:
        """The events of all choices in order, recorded in `task.usage` and the metrics; None after each keep-alive interval.

        Each choice waits for its own turn, so that many choices do not delay other clients more than many requests do.
        """
        last_token, usage = task.arrived, task.usage
        try:
            for choice, request in enumerate(task.requests):
                new_prompt = choice % task.choices == 0
                async with aclosing(self._choice_events(task, choice)) as events:
                    async for event in events:
                        if event is None:
                            yield None
                            continue
                        if new_prompt:
                            new_prompt = False
                            self._record_prompt(usage, len(request.prompt), event)
                        if event.prompt_logprobs is not None:
                            task.prompt_logprobs[choice // task.choices] = event.prompt_logprobs
                        now = time.monotonic()
                        task.stats.setdefault("first_token_ms", round(1e3 * (now - task.arrived), 1))
                        self._record_latency(usage.completion_tokens == 0, now - last_token, len(event.tokens))
                        last_token = now
                        usage.record_event(event)
                        task.stats.update(
                            prompt_tokens=usage.prompt_tokens,
                            cached_tokens=usage.cached_tokens,
                            completion_tokens=usage.completion_tokens,
                            steps=usage.steps,
                            finish=",".join(usage.finishes),
                        )
                        if event.step is not None:
                            self.metrics.record_step(event.step, len(event.tokens))
                        yield ChoiceEvent(choice, event)
        finally:
            if task.requests[0].temporary:
                self.engine.forget(task.requests[0])
        self.metrics.request_duration.observe(time.monotonic() - task.arrived)

    async def _choice_events(self, task: GenerationTask, choice: int) -> AsyncGenerator[TokenEvent | None, None]:
        """One choice's text, up to where the task's stop ends it. None when its turn begins, and as in `EngineLike`."""
        stop = task.new_stop() if task.new_stop else None
        async with aclosing(self.engine.generate(task.requests[choice], task.arrived, admitted=choice > 0)) as events:
            async for each in events:
                event = each if isinstance(each, TokenEvent) else None
                cut = stop.feed(event.text) if stop and event else None
                if event and cut:
                    yield replace(event, text=event.text[: cut.characters], finish=cut.finish, stop_string=None)
                    return
                yield event

    def _record_prompt(self, usage: Usage, tokens: int, first: TokenEvent) -> None:
        usage.prompt_tokens += tokens
        usage.cached_tokens += first.cached_tokens
        self.metrics.prompt_tokens.inc(tokens)
        self.metrics.cached_prompt_tokens.inc(first.cached_tokens)
        if first.reuse is not None:
            self.metrics.session_requests.labels(first.reuse).inc()

    def _record_latency(self, first: bool, seconds: float, tokens: int) -> None:
        if first:
            self.metrics.time_to_first_token.observe(seconds)
            return
        for _ in range(tokens):
            self.metrics.inter_token_latency.observe(seconds / tokens)


def new_output(task: GenerationTask, choice: int) -> ChoiceOutput:
    """The output of a choice before its first event: empty, or the echoed prompt."""
    if not task.echoes:
        return ChoiceOutput(choice)
    number = choice // task.choices
    echo, tokens, logprobs = task.echoes[number], task.requests[choice].prompt, task.prompt_logprobs.get(number)
    if logprobs is not None:  # the first token has none
        logprobs = TokenLogprobs([0.0, *logprobs.chosen], [[], *logprobs.ids], [[], *logprobs.values])
    return ChoiceOutput(choice, tokens=list(tokens), logprobs=logprobs, echoed_tokens=len(tokens), pieces=[(echo, len(tokens))])


def outputs_of(task: GenerationTask, batch: Sequence[ChoiceEvent], begun: Collection[int]) -> Iterator[ChoiceOutput]:
    """Joins consecutive events of a choice. The choices `begun` have had outputs."""
    for choice, group in groupby(batch, key=lambda item: item.choice):
        output = ChoiceOutput(choice) if choice in begun else new_output(task, choice)
        for item in group:
            output.add(item.event)
        yield output
