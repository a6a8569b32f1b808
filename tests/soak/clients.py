"""Clients of two servers that share their sessions; every answer is compared with plain decoding.

They send streaming and other requests with random drafters, sessions and temperatures, disconnect, and send invalid requests.
The first server's worker is killed twice, and the second server is restarted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.http.client import Outcome, complete, metric, new_client, served_model, sleep_until, stream
from bench.http.process import find_worker
from bench.plan import PROMPTS, read_prompts
from tests.soak.memory import Memory, processes_of
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


@dataclass
class Record:
    """Events and samples of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)  # times of requests that ended with an error, seconds from the start
    killed_at: list[float] = field(default_factory=list)  # seconds from the start
    memory: Memory = field(default_factory=Memory)


class Soak:
    """One run against the servers."""

    def __init__(self, servers: Servers, key: str, questions: int, seconds: float) -> None:
        self._servers = servers
        self._headers = {"Authorization": f"Bearer {key}"}
        self._clients: dict[str, httpx.AsyncClient] = {}  # by the server's address
        self._questions = make_questions(questions)
        self._answers: list[list[int]] = []  # token ids
        self._started = 0.0
        self._seconds = seconds
        self._rng = random.Random(2)
        self.record = Record()

    async def learn(self) -> None:
        """Asks every question once without drafts, one after the other."""
        client = self._client(self._servers.urls[0])
        self._model = await served_model(client)
        for question in self._questions:
            plain = await complete(client, question | {"model": self._model, "speculation": {"drafter": "none"}})
            assert plain.answered, plain
            self._answers.append(plain.tokens)

    async def run(self) -> None:
        """Asks questions at random until the time is over."""
        self._started = time.perf_counter()
        self.record.memory = Memory()
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
        while self._elapsed < self._seconds:
            with self._servers.one() as url:
                await self._ask(self._client(url))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        number = self._rng.randrange(len(self._questions))
        fields: dict[str, Any] = {"model": self._model, "speculation": {"drafter": self._rng.choice(DRAFTERS)}}
        fields |= self._questions[number]
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
            await self._check(number, await send(client, fields))

    async def _check(self, number: int, outcome: Outcome) -> None:
        if outcome.status == 429:
            self.record.counts["refused"] += 1
            await asyncio.sleep(0.05)
        elif outcome.answered and outcome.tokens == self._answers[number]:
            self.record.counts["right answers"] += 1
        elif outcome.answered:
            self.record.wrong.append(f"{number}: {outcome.tokens[:8]}... for {self._answers[number][:8]}...")
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
        files = [{"path": f"{number}.py", "text": question["prompt"]} for number, question in enumerate(questions)]
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
                found = ((f"{name} {number}", process) for name, process in processes_of(server_id))
                self.record.memory.sample(each for each in found if each[0].startswith(("front end", "worker")))
            await asyncio.sleep(SAMPLE_SECONDS)


def make_questions(count: int) -> list[dict[str, Any]]:
    """The fields of random requests."""
    rng = random.Random(1)
    questions = []
    for number, prompt in enumerate((read_prompts(PROMPTS) * count)[:count]):
        temperature, limit = rng.choice((0.0, 0.7, 1.0)), rng.randint(8, 96)
        questions.append({"prompt": prompt, "temperature": temperature, "seed": number, "max_tokens": limit})
    return questions
