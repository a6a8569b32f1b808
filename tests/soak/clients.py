"""Clients of two servers that share their sessions; every answer is compared with plain decoding.

They send streaming and other requests with random drafters, sessions and temperatures, disconnect, and send invalid requests.
The first server's worker is killed twice, and the second server is restarted.
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
from typing import Any, NamedTuple

import httpx

from bench.http.client import Outcome, complete, metric, new_client, served_model, sleep_until, stream
from bench.http.process import find_worker, resident_mb
from tests.soak.questions import Question
from tests.soak.servers import Servers

CLIENTS = 8
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
# A corpus that both servers have, its files, and the time between two changes of it.
CORPUS, FILES, CHANGE_SECONDS = "soak", 16, 2.0
# The first server's worker is killed at these shares of the duration.
KILLS = (1 / 3, 2 / 3)
# The second server is restarted at these shares of the duration.
RESTARTS = (1 / 6, 1 / 2)
SAMPLE_SECONDS = 5.0
# The time until a new worker has reported its sessions.
REPORT_SECONDS = 2.0
# The memory of a process counts after this time.
SETTLING_SECONDS = 60.0


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
    killed_at: list[float] = field(default_factory=list)  # seconds from the start
    memory: dict[str, list[Sample]] = field(default_factory=dict)  # by process


class Soak:
    """One run against the servers."""

    def __init__(self, servers: Servers, key: str, questions: list[Question], seconds: float) -> None:
        self._servers = servers
        self._headers = {"Authorization": f"Bearer {key}"}
        self._clients: dict[str, httpx.AsyncClient] = {}  # by the server's address
        self._questions = questions
        self._started = time.perf_counter()
        self._seconds = seconds
        self._rng = random.Random(2)
        self.record = Record()

    async def run(self) -> None:
        for url in self._servers.urls:
            await self._post(self._client(url))
        async with asyncio.TaskGroup() as tasks:
            works = (self._watch(), self._kill(), self._restart(), self._change_corpus())
            for work in (*works, *(self._run_client() for _ in range(CLIENTS))):
                tasks.create_task(work)
        for client in self._clients.values():
            await client.aclose()

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _client(self, url: str) -> httpx.AsyncClient:
        if url not in self._clients:
            self._clients[url] = new_client(url)
            self._clients[url].headers.update(self._headers)
        return self._clients[url]

    async def _run_client(self) -> None:
        with self._servers.one() as url:
            model = await served_model(self._client(url))
        while self._elapsed < self._seconds:
            with self._servers.one() as url:
                await self._ask(self._client(url), model)

    async def _ask(self, client: httpx.AsyncClient, model: str) -> None:
        question = self._rng.choice(self._questions)
        fields = question.fields | {"model": model, "speculation": {"drafter": self._rng.choice(DRAFTERS)}}
        if self._rng.random() < 0.5:
            fields["speculation"]["corpus"] = CORPUS
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
            self.record.failed_at.append(self._elapsed)

    async def _change_corpus(self) -> None:
        """Changes the corpus on one server or the other."""
        while self._elapsed < self._seconds:
            with self._servers.one() as url:
                await self._post(self._client(url))
            await asyncio.sleep(CHANGE_SECONDS)

    async def _post(self, client: httpx.AsyncClient) -> None:
        questions = self._rng.sample(self._questions, FILES)
        files = [{"path": f"{number}.py", "text": question.fields["prompt"]} for number, question in enumerate(questions)]
        response = await client.post("/v1/outrider/corpora", json={"name": CORPUS, "files": files})
        self.record.counts["corpus changed" if response.is_success else f"corpus: {response.text[:200]}"] += 1

    async def _kill(self) -> None:
        for share in KILLS:
            await sleep_until(self._started + share * self._seconds)
            worker = find_worker(self._servers.ids[0])
            assert worker is not None
            self.record.killed_at.append(self._elapsed)
            os.kill(worker, signal.SIGKILL)

    async def _restart(self) -> None:
        for share in RESTARTS:
            await sleep_until(self._started + share * self._seconds)
            await self._servers.restart(1, self._count_sessions)
            self.record.counts["restarts"] += 1

    async def _count_sessions(self, url: str) -> None:
        """Counts the sessions that a new server has found in the folder."""
        await asyncio.sleep(REPORT_SECONDS)
        self.record.counts["sessions from disk"] += int(await metric(self._client(url), "outrider_sessions"))

    async def _watch(self) -> None:
        while self._elapsed < self._seconds:
            for number, server_id in enumerate(self._servers.ids, 1):
                for name, process in ((f"front end {number}", server_id), (f"worker {number}", find_worker(server_id))):
                    if process is not None and (used := resident_mb(process)):
                        self.record.memory.setdefault(name, []).append(Sample(self._elapsed, process, used))
            await asyncio.sleep(SAMPLE_SECONDS)


def growth(samples: Sequence[Sample], full_at: float = 0.0) -> dict[str, float]:
    """Median memory of the last process in the first and the last quarter of its time.

    The time before `full_at` seconds, when the stores are full, and the process's first SETTLING_SECONDS do not count.
    """
    last = [sample for sample in samples if sample.process_id == samples[-1].process_id]
    start = max(full_at, last[0].seconds + SETTLING_SECONDS)
    settled = [sample.mb for sample in last if sample.seconds > start] or [s.mb for s in last]
    quarter = max(1, len(settled) // 4)
    early, late = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    return {"early_mb": round(early, 1), "late_mb": round(late, 1), "ratio": round(late / early, 4)}
