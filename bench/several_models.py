"""`python -m bench.several_models`: three models at one address, in 4 GB, under mixed load.

SmolLM2 is there as its file, with 8 bits and in float32. Clients ask a model for some seconds and then another one. At times
nobody asks, so models are loaded, and unloaded when they are idle. Every answer must be the one that the model gives without
drafts. The memory of the server without models must not grow.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from bench import report
from bench.http.control_group import joined, memory_group
from bench.http.process import ServerProcess, children, resident_mb, start
from bench.live.questions import read_tasks
from outrider.models import smollm2

MODELS: list[Any] = [
    smollm2.NAME,
    {"model": {"path": smollm2.NAME, "name": "eight-bits", "quantize": "int8"}},
    {"model": {"path": smollm2.NAME, "name": "float32", "dtype": "float32"}},
]
CLIENTS = 3
MEMORY_BYTES = 4 << 30
IDLE_SECONDS = 10.0
# A client stays with a model for at most this time, and all clients rest for REST_SECONDS in turns of ROUND_SECONDS.
STAY_SECONDS, ROUND_SECONDS, REST_SECONDS = 20.0, 120.0, 25.0
ANSWER_TOKENS = 48
MAX_GROWTH = 1.1  # of the front end's memory once all models are unloaded, over that after their first unload
CHANGE = re.compile(r"(loaded|unloading) ([\w.-]+)")


@dataclass
class Record:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)  # of the whole server, whenever no model is loaded


class Load:
    """The clients of a server."""

    def __init__(self, server: ServerProcess, questions: list[str], seconds: float) -> None:
        self._server, self._questions, self._end = server, questions, time.monotonic() + seconds
        self._expected: dict[tuple[str, str, float], str] = {}
        self.record = Record()

    async def run(self) -> None:
        """Asks in rounds, between which all models are unloaded."""
        async with httpx.AsyncClient(base_url=self._server.url, timeout=300) as http:
            names = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
            while time.monotonic() < self._end:
                until = min(self._end, time.monotonic() + ROUND_SECONDS)
                await asyncio.gather(*(self._client(http, names, random.Random(number), until) for number in range(CLIENTS)))
                await asyncio.sleep(REST_SECONDS)
                if await self._is_empty(http):
                    self.record.memory_mb.append(memory_of(self._server))
                else:
                    self.record.counts["models that were not unloaded"] += 1

    async def _client(self, http: httpx.AsyncClient, names: list[str], rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            name, leave = rng.choice(names), time.monotonic() + rng.uniform(1, STAY_SECONDS)
            while time.monotonic() < min(until, leave):
                await self._ask(http, name, rng.choice(self._questions), rng.choice([0.0, 0.8]), rng.random() < 0.5)

    async def _ask(self, http: httpx.AsyncClient, name: str, question: str, temperature: float, stream: bool) -> None:
        key = (name, question, temperature)
        if key not in self._expected:
            self._expected[key] = await answer(http, name, question, temperature, False, "none")
        found = await answer(http, name, question, temperature, stream, "fusion")
        self.record.counts["stream" if stream else "body"] += 1
        if found != self._expected[key]:
            self.record.wrong.append(f"{name}, {temperature}: {found[:100]!r} instead of {self._expected[key][:100]!r}")

    async def _is_empty(self, http: httpx.AsyncClient) -> bool:
        cards = (await http.get("/v1/models")).json()["data"]
        return all(card["status"]["value"] == "unloaded" for card in cards)


async def answer(http: httpx.AsyncClient, name: str, question: str, temperature: float, stream: bool, drafter: str) -> str:
    """The text of an answer, or its error."""
    body = {
        "model": name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": temperature,
        "seed": 1,
        "stream": stream,
        "speculation": {"drafter": drafter},
    }
    response = await http.post("/v1/chat/completions", json=body)
    if not stream:
        found = response.json()
        return str(found["choices"][0]["message"]["content"] if "choices" in found else found)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices"))


def memory_of(server: ServerProcess) -> float:
    """MiB of the server's processes without pages of mapped files."""
    waiting, found = [server.process.pid], 0.0
    while waiting:
        process = waiting.pop()
        found += resident_mb(process)
        waiting += children(process)
    return round(found, 1)


def main(
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl.")],
    minutes: Annotated[float, typer.Option(help="Duration.")] = 15.0,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "several-models.json",
) -> None:
    """Start the server and its clients. Exit code 1 if an answer was wrong or memory was not returned."""
    questions = [texts[0] for texts in read_tasks(prompts).values() if len(texts[0]) < 1000]
    flags = ["--models.paths", json.dumps(MODELS), "--models.idle_seconds", str(IDLE_SECONDS)]
    with memory_group(MEMORY_BYTES) as group, ExitStack() as stack:
        with joined(group):
            server = stack.enter_context(start(["outrider.server.cli", "serve", *flags], "/health"))
        load = Load(server, questions, 60 * minutes)
        asyncio.run(load.run())
        changes = Counter(f"{match[1]} {match[2]}" for line in server.log if (match := CHANGE.search(line)))
    record = load.record
    figures = {
        "minutes": minutes,
        "memory_limit_bytes": MEMORY_BYTES if group else None,
        "answers": dict(record.counts),
        "wrong_answers": record.wrong,
        "changes": dict(changes),
        "memory_mb_without_models": record.memory_mb,
    }
    Console().print(figures)
    report.save(out, figures)
    if record.wrong or not record.memory_mb or record.memory_mb[-1] > MAX_GROWTH * record.memory_mb[0]:
        print("failed: an answer was wrong, or memory was not returned.", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
