"""`python -m bench.soak`: fifteen minutes of mixed requests, each answer compared with plain decoding.

Clients send streaming and other requests with random drafters, sessions and temperatures, disconnect, and send invalid
requests; the worker is killed twice. Only requests that run on a killed worker may fail.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console

from bench import report
from bench.decode import encode
from bench.http.client import Outcome, complete, metric, new_client, served_model, sleep_until, stream
from bench.http.process import find_worker, resident_mb, start_server
from bench.plan import PROMPTS, read_prompts
from outrider.drafters.none import NoDrafter
from outrider.server.settings import load_settings
from outrider.server.worker.runtime import load
from outrider.verify.decode import decode
from outrider.verify.generation import DecodeOptions
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import TreeVerifier

CLIENTS, ACTIVE, WAITING = 8, 4, 4
QUESTIONS = 48
FLAGS = {
    "model.dtype": "float32",
    "model.threads": "1",
    "scheduling.max_active": str(ACTIVE),
    "scheduling.max_waiting": str(WAITING),
}
DRAFTERS = ("none", "trigram", "fusion", "lookup", "lookahead")
INVALID: list[dict[str, Any]] = [
    {"temperature": 9},
    {"prompt": []},
    {"max_tokens": -1},
    {"model": "nobody"},
    {"stop": ["x"] * 99},
    {"prompt": [1 << 40]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"$ref": "#/nowhere"}}}},
]
KILLS = (1 / 3, 2 / 3)  # of the duration
SAMPLE_SECONDS = 5.0
SETTLING_SECONDS = 60.0  # of a process, before its memory counts


@dataclass(frozen=True)
class Question:
    """A request and its expected answer."""

    fields: dict[str, Any]
    tokens: list[int]  # ids


def make_questions(count: int) -> list[Question]:
    """Random requests, with the tokens of plain decoding."""
    rng = random.Random(1)
    runtime = load(load_settings(None, FLAGS))
    questions = []
    for number, prompt in enumerate((read_prompts(PROMPTS) * count)[:count]):
        temperature, limit = rng.choice((0.0, 0.7, 1.0)), rng.randint(8, 96)
        params = SamplingParams(temperature=temperature, seed=number)
        options = DecodeOptions(params, limit, runtime.stop_ids, 0)
        verifier = TreeVerifier(runtime.runner, runtime.runner.new_cache())
        tokens = decode(verifier, NoDrafter(), encode(runtime, prompt), options).tokens
        questions.append(Question({"prompt": prompt, "temperature": temperature, "seed": number, "max_tokens": limit}, tokens))
    return questions


class Sample(NamedTuple):
    """Memory of a process at one time."""

    seconds: float  # from the start
    process_id: int
    mb: float


@dataclass
class Record:
    """Events and samples of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)  # times of requests that ended with an error, seconds from the start
    max_running: float = 0
    max_waiting: float = 0
    memory: dict[str, list[Sample]] = field(default_factory=lambda: {"front": [], "worker": []})


class Soak:
    """One run against one server."""

    def __init__(self, url: str, process_id: int, questions: list[Question], seconds: float) -> None:
        self._url = url
        self._process_id = process_id
        self._questions = questions
        self._started = time.perf_counter()
        self._end = self._started + seconds
        self._kill_times = [self._started + seconds * share for share in KILLS]
        self._rng = random.Random(2)
        self.record = Record()

    async def run(self) -> None:
        async with new_client(self._url) as client:
            self._model = await served_model(client)
            await asyncio.gather(*(self._run_client(client) for _ in range(CLIENTS)), self._watch(client), self._kill())

    async def _run_client(self, client: httpx.AsyncClient) -> None:
        while time.perf_counter() < self._end:
            question = self._rng.choice(self._questions)
            fields = question.fields | {"model": self._model, "speculation": {"drafter": self._rng.choice(DRAFTERS)}}
            if self._rng.random() < 0.4:
                fields["session_id"] = f"session {self._rng.randrange(6)}"
            kind = self._rng.random()
            if kind < 0.15:
                outcome = await stream(client, fields | {"max_tokens": 400}, self._rng.randint(1, 20))
                self._record_outcome("left" if outcome.status == 200 else "refused", outcome)
            elif kind < 0.3:
                outcome = await complete(client, fields | self._rng.choice(INVALID))
                self._record_outcome(
                    "wrong requests" if 400 <= outcome.status < 500 else f"wrong request got {outcome.status}", outcome
                )
            else:
                send = stream if self._rng.random() < 0.6 else complete
                await self._check(question, await send(client, fields))

    async def _check(self, question: Question, outcome: Outcome) -> None:
        if outcome.status == 429:
            self.record.counts["refused"] += 1
            await asyncio.sleep(0.05)
        elif outcome.answered and outcome.tokens == question.tokens:
            self.record.counts["right answers"] += 1
        elif outcome.answered:
            self.record.wrong.append(f"{question.fields['seed']}: {outcome.tokens[:8]}... for {question.tokens[:8]}...")
        else:
            self._record_outcome("failed", outcome)

    def _record_outcome(self, kind: str, outcome: Outcome) -> None:
        self.record.counts[kind] += 1
        if kind == "failed":
            self.record.counts[f"failed: {outcome.status} {outcome.error}"] += 1
        if kind == "failed" or (outcome.error and kind != "left"):
            self.record.failed_at.append(time.perf_counter() - self._started)

    async def _kill(self) -> None:
        for moment in self._kill_times:
            await sleep_until(moment)
            worker = find_worker(self._process_id)
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
            self.record.counts["kills"] += 1

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while time.perf_counter() < self._end:
            record = self.record
            record.max_running = max(record.max_running, await metric(client, "outrider_requests_running"))
            record.max_waiting = max(record.max_waiting, await metric(client, "outrider_requests_waiting"))
            worker = find_worker(self._process_id)
            for name, process in (("front", self._process_id), ("worker", worker)):
                if process is not None:
                    elapsed = time.perf_counter() - self._started
                    record.memory[name].append(Sample(elapsed, process, resident_mb(process)))
            await asyncio.sleep(SAMPLE_SECONDS)


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Median memory of the last process in the first and the last quarter of its time, after SETTLING_SECONDS."""
    last = [sample for sample in samples if sample.process_id == samples[-1].process_id]
    settled = [sample.mb for sample in last if sample.seconds > last[0].seconds + SETTLING_SECONDS] or [s.mb for s in last]
    quarter = max(1, len(settled) // 4)
    early, late = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    return {"early_mb": round(early, 1), "late_mb": round(late, 1), "ratio": round(late / early, 4)}


def main(
    minutes: Annotated[float, typer.Option(help="Duration.")] = 15.0,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "soak.json",
) -> None:
    """Start a server and run the soak test."""
    questions = make_questions(QUESTIONS)
    with start_server([word for name, value in FLAGS.items() for word in (f"--{name}", value)]) as server:
        soak = Soak(server.url, server.process.pid, questions, 60 * minutes)
        asyncio.run(soak.run())
    record = soak.record
    figures = {
        "minutes": minutes,
        "clients": CLIENTS,
        "counts": dict(record.counts),
        "wrong_answers": record.wrong,
        "failed_at_seconds": [round(at, 1) for at in record.failed_at],
        "killed_at_seconds": [round(60 * minutes * share, 1) for share in KILLS],
        "most_running": [record.max_running, ACTIVE],
        "most_waiting": [record.max_waiting, WAITING],
        "memory_front": growth(record.memory["front"]),
        "memory_worker": growth(record.memory["worker"]),
    }
    Console().print(figures)
    report.save(out, figures)


if __name__ == "__main__":
    typer.run(main)
