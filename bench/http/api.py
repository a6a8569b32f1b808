"""`outrider bench api`: the front end's own cost of reading a request and of writing a chunk of an answer.

There is no model and no socket: the engine is a list of events. The figures are the time that HTTP adds on one core.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from outrider import models
from outrider.server.chat.prompt import PromptEncoder, TemplateOptions
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import Request, StepReport, TokenEvent
from outrider.server.openai.chat import ChatFormatter
from outrider.server.openai.generation import GenerationRunner, GenerationTask
from outrider.server.openai.schema import ChatBody
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.tokenizer import load_tokenizer

CHUNKS = 2000
CONTEXT_TOKENS = 2048
REQUESTS = 300
BODY = {
    "model": models.NAME,
    "messages": [{"role": "user", "content": "Write a function that reads a file and returns its lines."}] * 3,
    "stream": True,
    "temperature": 0.7,
    "max_tokens": 200,
}


class ListEngine:
    """An engine that yields prepared events."""

    def __init__(self, events: list[TokenEvent]) -> None:
        self._events = events

    async def generate(
        self, request: Request, arrived: float | None = None, admitted: bool = False
    ) -> AsyncGenerator[TokenEvent | None, None]:
        """Yields the events, each after an iteration of the event loop, as from a socket."""
        for event in self._events:
            await asyncio.sleep(0)
            yield event

    def forget(self, request: Request) -> None:
        """There are no sessions."""


def events() -> list[TokenEvent]:
    """The events of an answer: steps of three tokens, as typical of the embedded model."""
    step = StepReport(1e-4, 5e-3, 1e-4, {"trigram": 8}, {"trigram": 2})
    steps = [TokenEvent("r", [40, 41, 42], " some text", None, step) for _ in range(CHUNKS)]
    return [*steps, TokenEvent("r", [43], "", "stop", step)]


async def chunk_seconds() -> list[float]:
    """Seconds per chunk: metrics, formatting, and one iteration of the event loop."""
    tokenizer = load_tokenizer(str(models.TARGET))
    runner = GenerationRunner(ListEngine(events()), Metrics())
    request = Request("r", [1, 2, 3], SamplingParams(), 100)
    body = ChatBody.model_validate(BODY | {"stream_options": {"include_usage": True}})
    task = GenerationTask([request], ChatFormatter(body, Vocabulary(tokenizer)), time.monotonic())
    times, last = [], time.perf_counter()
    async for _ in runner.stream(task):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


async def request_seconds() -> list[float]:
    """Seconds per request: parsing, validation, rendering the template, tokenizing."""
    prompts = PromptEncoder(load_tokenizer(str(models.TARGET)))
    data = msgspec.json.encode(BODY)
    times = []
    for _ in range(REQUESTS):
        started = time.perf_counter()
        body = ChatBody.model_validate(msgspec.json.decode(data))
        await prompts.chat("", [message.rendered() for message in body.messages], TemplateOptions(), CONTEXT_TOKENS)
        times.append(time.perf_counter() - started)
    return times


def run(out: Path | None) -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given."""
    figures = {
        "chunk_us": report.microsecond_quantiles(asyncio.run(chunk_seconds())),
        "request_us": report.microsecond_quantiles(asyncio.run(request_seconds())),
    }
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def show(figures: dict[str, dict[str, float]]) -> None:
    """Prints microseconds per chunk and per request."""
    report.print_table(
        "Microseconds of the front end",
        ("per", "p50", "p99"),
        [(name.removesuffix("_us"), row["p50"], row["p99"]) for name, row in figures.items()],
        "chunk: one chunk of a streamed answer; request: parsing and tokenizing a chat request.",
    )
