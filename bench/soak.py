"""`python -m bench.soak`: a quarter of an hour of everything at once, each answer compared with plain decoding.

Streams and whole answers, with drafters, sessions and temperatures by lot; clients that go away; wrong requests; and twice
the worker is killed. What may fail is what the killed worker was at, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from bench import report
from bench.decode import encode, read_prompts
from bench.http.client import Outcome, metric, model_of, new_client, resident_mb, stream, until, whole, worker_of
from bench.http.serve import server
from drafters.none import NoDrafter
from server.settings import load_settings
from server.worker.runtime import load
from verify.decode import DecodeOptions, decode
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier

PROMPTS = Path(__file__).parent / "prompts.jsonl"
CLIENTS, ACTIVE, WAITING = 8, 4, 4
FLAGS = {
    "model.dtype": "float32",
    "model.threads": "1",
    "scheduling.max_active": str(ACTIVE),
    "scheduling.max_waiting": str(WAITING),
}
DRAFTERS = ("none", "trigram", "fusion", "lookup", "lookahead")
WRONG: list[dict[str, Any]] = [
    {"temperature": 9},
    {"prompt": []},
    {"max_tokens": -1},
    {"model": "nobody"},
    {"stop": ["x"] * 99},
    {"prompt": [1 << 40]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"$ref": "#/nowhere"}}}},
]
SAMPLE_SECONDS = 5.0


@dataclass(frozen=True)
class Question:
    """A request and its right answer."""

    fields: dict[str, Any]
    tokens: list[int]


def questions(count: int) -> list[Question]:
    """With the tokens of plain decoding, computed here."""
    lots = random.Random(1)
    loaded = load(load_settings(None, FLAGS))
    made = []
    for number, prompt in enumerate((read_prompts(PROMPTS, None) * count)[:count]):
        temperature, limit = lots.choice((0.0, 0.7, 1.0)), lots.randint(8, 96)
        params = SamplingParams(temperature=temperature, seed=number)
        options = DecodeOptions(params, limit, loaded.stop_ids, 0)
        verifier = TreeVerifier(loaded.runner, loaded.runner.new_cache())
        tokens = decode(verifier, NoDrafter(), encode(loaded, prompt), options).tokens
        made.append(Question({"prompt": prompt, "temperature": temperature, "seed": number, "max_tokens": limit}, tokens))
    return made


@dataclass
class Record:
    """What has happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)  # of requests that ended with an error
    most_running: float = 0
    most_waiting: float = 0
    memory: dict[str, list[tuple[float, int, float]]] = field(
        default_factory=lambda: {"front": [], "worker": []}
    )  # time, process, MB


class Soak:
    """One run against one server."""

    def __init__(self, url: str, process_id: int, asked: list[Question], seconds: float) -> None:
        self._url = url
        self._process_id = process_id
        self._questions = asked
        self._started = time.perf_counter()
        self._end = self._started + seconds
        self._kills = [self._started + seconds * part for part in (1 / 3, 2 / 3)]
        self._lots = random.Random(2)
        self.record = Record()

    async def run(self) -> None:
        async with new_client(self._url) as client:
            self._model = await model_of(client)
            await asyncio.gather(*(self._ask(client) for _ in range(CLIENTS)), self._watch(client), self._kill())

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while time.perf_counter() < self._end:
            question = self._lots.choice(self._questions)
            fields = question.fields | {"model": self._model, "speculation": {"drafter": self._lots.choice(DRAFTERS)}}
            if self._lots.random() < 0.4:
                fields["session_id"] = f"session {self._lots.randrange(6)}"
            kind = self._lots.random()
            if kind < 0.15:
                out = await stream(client, fields | {"max_tokens": 400}, self._lots.randint(1, 20))
                self._saw("left" if out.status == 200 else "refused", out)
            elif kind < 0.3:
                out = await whole(client, fields | self._lots.choice(WRONG))
                self._saw("wrong requests" if 400 <= out.status < 500 else f"wrong request got {out.status}", out)
            else:
                ask = stream if self._lots.random() < 0.6 else whole
                await self._check(question, await ask(client, fields))

    async def _check(self, question: Question, out: Outcome) -> None:
        if out.status == 429:
            self.record.counts["refused"] += 1
            await asyncio.sleep(0.05)
        elif out.answered and out.tokens == question.tokens:
            self.record.counts["right answers"] += 1
        elif out.answered:
            self.record.wrong.append(f"{question.fields['seed']}: {out.tokens[:8]}... for {question.tokens[:8]}...")
        else:
            self._saw("failed", out)

    def _saw(self, what: str, out: Outcome) -> None:
        self.record.counts[what] += 1
        if what == "failed":
            self.record.counts[f"failed: {out.status} {out.error}"] += 1
        if what == "failed" or (out.error and what != "left"):
            self.record.failed_at.append(time.perf_counter() - self._started)

    async def _kill(self) -> None:
        for moment in self._kills:
            await until(moment)
            worker = worker_of(self._process_id)
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
            self.record.counts["kills"] += 1

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while time.perf_counter() < self._end:
            record = self.record
            record.most_running = max(record.most_running, await metric(client, "outrider_requests_running"))
            record.most_waiting = max(record.most_waiting, await metric(client, "outrider_requests_waiting"))
            worker = worker_of(self._process_id)
            for name, process in (("front", self._process_id), ("worker", worker)):
                if process is not None:
                    record.memory[name].append((time.perf_counter() - self._started, process, resident_mb(process)))
            await asyncio.sleep(SAMPLE_SECONDS)


def growth(samples: list[tuple[float, int, float]]) -> dict[str, float]:
    """Of the process that was there last: memory at the beginning and the end of its time, the first minute left out."""
    last = samples[-1][1]
    mine = [(at, size) for at, process, size in samples if process == last]
    settled = [size for at, size in mine if at > mine[0][0] + 60] or [size for _, size in mine]
    part = max(1, len(settled) // 4)
    early, late = statistics.median(settled[:part]), statistics.median(settled[-part:])
    return {"early_mb": round(early, 1), "late_mb": round(late, 1), "ratio": round(late / early, 4)}


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 15.0,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = report.RESULTS / "soak.json",
) -> None:
    """Soaks a server of its own."""
    asked = questions(48)
    with server([word for name, value in FLAGS.items() for word in (f"--{name}", value)]) as own:
        soak = Soak(own.url, own.process.pid, asked, 60 * minutes)
        asyncio.run(soak.run())
    record = soak.record
    figures = {
        "minutes": minutes,
        "clients": CLIENTS,
        "counts": dict(record.counts),
        "wrong_answers": record.wrong,
        "failed_at_seconds": [round(at, 1) for at in record.failed_at],
        "killed_at_seconds": [round(60 * minutes * part, 1) for part in (1 / 3, 2 / 3)],
        "most_running": [record.most_running, ACTIVE],
        "most_waiting": [record.most_waiting, WAITING],
        "memory_front": growth(record.memory["front"]),
        "memory_worker": growth(record.memory["worker"]),
    }
    Console().print(figures)
    report.save(out, figures)


if __name__ == "__main__":
    typer.run(main)
