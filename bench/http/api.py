"""`outrider bench api`: what the front end's own work costs: reading a request, and writing a chunk of an answer.

No model and no socket: the engine is a list of events. So it is what HTTP adds to every chunk on the front end's core.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

import models
from bench import report
from server.chat.prompt import PromptEncoder, TemplateOptions
from server.chat.vocabulary import Vocabulary
from server.engine.messages import Request, StepReport, TokenEvent
from server.openai.chat import ChatFormatter
from server.openai.generation import GenerationRunner, GenerationTask
from server.openai.schema import ChatBody
from server.telemetry.metrics import Metrics
from verify.sampling_params import SamplingParams
from verify.tokenizer import load_tokenizer

CHUNKS = 2000
REQUESTS = 300
BODY = {
    "model": models.NAME,
    "messages": [{"role": "user", "content": "Write a function that reads a file and returns its lines."}] * 3,
    "stream": True,
    "temperature": 0.7,
    "max_tokens": 200,
}


class Listed:
    """An engine that has all its events already, as the front end uses one."""

    def __init__(self, events: list[TokenEvent]) -> None:
        self._events = events

    async def generate(self, request: Request, admitted: bool = False) -> AsyncGenerator[TokenEvent | None, None]:
        """The events, and in between a turn of the event loop, as a socket would give."""
        for event in self._events:
            await asyncio.sleep(0)
            yield event


def events() -> list[TokenEvent]:
    """Steps of three tokens, as the embedded model makes them."""
    step = StepReport(1e-4, 5e-3, 1e-4, {"trigram": 8}, {"trigram": 2})
    made = [TokenEvent("r", 0, [40, 41, 42], " some text", None, step) for _ in range(CHUNKS)]
    return [*made, TokenEvent("r", 0, [43], "", "stop", step, last=True)]


async def chunk_microseconds() -> list[float]:
    """Of each chunk: counting it, writing it, and the turn of the event loop."""
    tokenizer = load_tokenizer(str(models.TARGET))
    runner = GenerationRunner(Listed(events()), Metrics())
    request = Request("r", [1, 2, 3], SamplingParams(), 100)
    body = ChatBody.model_validate(BODY | {"stream_options": {"include_usage": True}})
    task = GenerationTask([request], ChatFormatter(body, Vocabulary(tokenizer)), time.monotonic())
    times, last = [], time.perf_counter()
    async for _ in runner.stream(task):
        now = time.perf_counter()
        times.append(1e6 * (now - last))
        last = now
    return times


async def request_microseconds() -> list[float]:
    """Of each request: parsing, checking, rendering the template, tokenizing."""
    prompts = PromptEncoder(load_tokenizer(str(models.TARGET)))
    data = msgspec.json.encode(BODY)
    times = []
    for _ in range(REQUESTS):
        started = time.perf_counter()
        body = ChatBody.model_validate(msgspec.json.decode(data))
        await prompts.chat([message.rendered() for message in body.messages], TemplateOptions())
        times.append(1e6 * (time.perf_counter() - started))
    return times


def run(out: Path | None) -> dict[str, Any]:
    """Measures and prints; with `out`, saves the figures there, too."""
    figures = {}
    for name, measured in (("chunk", chunk_microseconds), ("request", request_microseconds)):
        quantiles = statistics.quantiles(asyncio.run(measured()), n=100)
        figures[f"{name}_us"] = {"p50": round(quantiles[49], 1), "p99": round(quantiles[98], 1)}
    table = Table("microseconds per", "p50", "p99")
    for name, row in figures.items():
        table.add_row(name.removesuffix("_us"), str(row["p50"]), str(row["p99"]))
    Console().print(table)
    if out:
        report.save(out, figures)
    return figures
