"""One run: attackers, a bystander, kills of the worker, and what was measured meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.hostile.answers import Answer, read
from bench.hostile.bombs import Bomb, filled_bombs, named_bombs
from bench.hostile.connections import HOLDS, HeldConnections, send_raw
from bench.hostile.folder import FolderTrouble
from bench.hostile.kills import SCENES, kill
from bench.hostile.malformed import METHODS, broken_http, mutated, odd_headers, random_path
from bench.hostile.stores import fill_stores
from bench.hostile.target import Target
from bench.http.client import new_client, quantiles
from bench.http.process import ServerProcess, find_worker, resident_mb

CLIENTS = 16
SHARES = {
    "named": 0.15,
    "filled": 0.08,
    "held": 0.05,
    "broken": 0.1,
    "malformed": 0.62,
}  # of the requests; the others are malformed at random
WARM_UP_SHARE = 0.3  # of the requests; memory is judged after them
BODY_WEIGHT = 8  # an endpoint with a body gets this many times more malformed requests than one without
PATIENCE_SECONDS = 5.0  # for the answer to a bomb
HANG_UP_SECONDS = (0.001, 0.3)  # after sending a bomb whose client does not wait
BYSTANDER_SECONDS = 0.25  # between its requests
MEMORY_SECONDS = 1.0  # between two samples
LOCATION = re.compile(rb"^location: *([^\r\n]*)", re.I | re.M)


@dataclass
class Record:
    """Counts, times and samples of a run."""

    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by kind
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of answers, by kind
    bad: list[str] = field(default_factory=list)
    kills: int = 0
    memory: dict[str, list[float]] = field(default_factory=lambda: {"front end": [], "worker": []})  # MB

    def forget_memory(self) -> None:
        """Drops the samples of memory so far."""
        for samples in self.memory.values():
            samples.clear()

    def add(self, kind: str, answer: Answer, started: float, kills: bool, request: str) -> None:
        """Counts an answer. `request` describes its request if the answer is bad."""
        self.statuses[kind][answer.status] += 1
        self.seconds[kind].append(time.perf_counter() - started)
        fault = answer.fault(kills)
        if fault is not None:
            self.bad.append(f"{kind}: {fault} ({request})")

    def figures(self) -> dict[str, Any]:
        return {
            "statuses": {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.statuses.items())},
            "milliseconds": {kind: quantiles(seconds) for kind, seconds in sorted(self.seconds.items())},
            "bad": len(self.bad),
            "bad_examples": self.bad[:20],
            "kills": self.kills,
        }


class Attack:
    """One run against one server. Call `run` once."""

    def __init__(
        self,
        target: Target,
        server: ServerProcess,
        requests: int,
        kills: int,
        seed: int,
        answers: Mapping[str, str] | None = None,
        others: Sequence[str] = (),
        trouble: FolderTrouble | None = None,
    ) -> None:
        """`answers` are the right ones to the bystander's prompts, which it sends to the servers at `others`, too."""
        self._answers = dict(answers or {"def f(": ""})
        self._urls = ["", *others]
        self._trouble = trouble
        self._target = target
        self._server = server
        self._requests = requests
        self._kills = kills
        self._rng = random.Random(seed)
        self._rng_of_bystander = random.Random(seed + 1)
        self._held = HeldConnections(target)
        self._named, self._filled = self._endless(named_bombs()), self._endless(filled_bombs(target.endpoints))
        endpoints = [endpoint for endpoint in target.endpoints if endpoint.path != "/ready"]  # a 503 is its answer after a kill
        self._endpoints = [*endpoints, *(BODY_WEIGHT * [endpoint for endpoint in endpoints if endpoint.valid is not None])]
        self._holds = itertools.cycle(HOLDS.items())
        self._scenes = itertools.cycle(SCENES)
        self.record = Record()

    @property
    def _server_alive(self) -> bool:
        return self._server.process.poll() is None

    async def run(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Sends all requests, unless the server ends. Kills the worker during the warm-up, which ends with full stores."""
        turns = iter(range(1, 1 + self._requests))
        warm_up = int(WARM_UP_SHARE * self._requests)
        every = max(1, warm_up // (1 + self._kills))
        warm = asyncio.Event()
        async with new_client(self._target.url) as client:

            async def run_attacker() -> None:
                for turn in turns:
                    if not self._server_alive:
                        return warm.set()
                    if self._kills and turn % every == 0 and turn // every <= self._kills:
                        await self._kill(client)
                    if turn == max(1, warm_up):
                        await fill_stores(client, self._target, self._add_fill)
                        self.record.forget_memory()
                        warm.set()
                    elif turn > warm_up:
                        await warm.wait()
                    await self._send_one(client)
                    on_progress()

            trouble = [] if self._trouble is None else [self._trouble.run()]
            async with self._in_background(self._stand_by(client), self._sample_memory(), *trouble):
                await asyncio.gather(*(run_attacker() for _ in range(CLIENTS)))
        self._held.close()

    @asynccontextmanager
    async def _in_background(self, *work: Any) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _endless(self, bombs: list[Bomb]) -> Iterator[Bomb]:
        self._rng.shuffle(bombs)
        return itertools.cycle(bombs)

    async def _send_one(self, client: httpx.AsyncClient) -> None:
        [kind] = self._rng.choices([*SHARES], [*SHARES.values()])
        match kind:
            case "named":
                await self._send_bomb(client, next(self._named))
            case "filled":
                await self._send_bomb(client, next(self._filled))
            case "held":
                await self._hold()
            case "broken":
                await self._send_broken()
            case _:
                await self._send_malformed(client)

    async def _send_malformed(self, client: httpx.AsyncClient) -> None:
        rng = self._rng
        endpoint = rng.choice(self._endpoints)
        path, content = random_path(rng, endpoint.path), mutated(rng, endpoint)
        method = endpoint.method if rng.random() < 0.95 else rng.choice(METHODS)
        headers = odd_headers(rng, rng.choice(self._target.keys))
        await self._read("malformed", client, method, path, content, headers)

    async def _send_bomb(self, client: httpx.AsyncClient, bomb: Bomb) -> None:
        content = await asyncio.to_thread(bomb.body, self._target)
        headers = {"Authorization": f"Bearer {self._rng.choice(self._target.keys)}", "Content-Type": "application/json"}
        seconds = self._rng.uniform(*HANG_UP_SECONDS) if bomb.hangs_up else PATIENCE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._read(bomb.kind, client, "POST", bomb.path, content, headers)
        except TimeoutError:
            self.record.statuses[bomb.kind]["left"] += 1

    async def _send_broken(self) -> None:
        content, started = broken_http(self._rng, self._target), time.perf_counter()
        status, head = await send_raw(self._target, content)
        location = LOCATION.search(head)
        answer = Answer(status, location=location[1].decode("latin-1") if location else "")
        self.record.add("broken", answer, started, False, repr(content[:200]))

    def _add_fill(self, answer: Answer, started: float, path: str) -> None:
        """Counts the answer to a request that fills a store. Without a 200, the store is not full."""
        self.record.add("fill", answer, started, False, path)
        if answer.status != "200" and answer.fault(False) is None:
            self.record.bad.append(f"fill: {answer.status} {answer.code}: {answer.text[:200]} (POST {path})")

    async def _hold(self) -> None:
        name, content = next(self._holds)
        self.record.statuses[f"held: {name}"][await self._held.hold(content(self._target))] += 1

    async def _kill(self, client: httpx.AsyncClient) -> None:
        scene, started = next(self._scenes), time.perf_counter()
        headers = {"Authorization": f"Bearer {self._target.keys[0]}"}
        answer = await kill(scene, self._target, client, headers, self._server.process.pid, self._held)
        if answer is not None:
            self.record.kills += 1
            self.record.add(f"killed {scene.name}", answer, started, True, scene.name)

    async def _read(
        self, kind: str, client: httpx.AsyncClient, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> None:
        started = time.perf_counter()
        answer = await read(client, method, path, content=content, headers=headers)
        described = f"{method} {path[:80]} {content[:300]!r}"
        self.record.add(kind, answer, started, self._kills > 0, described)

    async def _stand_by(self, client: httpx.AsyncClient) -> None:
        """Another client, with its own key, that asks for a few tokens at a time, and knows what they should be."""
        headers = {"Authorization": f"Bearer {self._target.bystanders_key}", "Content-Type": "application/json"}
        while True:
            prompt, expected = self._rng_of_bystander.choice(list(self._answers.items()))
            url, started = self._rng_of_bystander.choice(self._urls), time.perf_counter()
            body = bystanders_body(self._target.model, prompt)
            answer = await read(client, "POST", f"{url}/v1/completions", json=body, headers=headers)
            self.record.add("bystander", answer, started, self._kills > 0, prompt)
            if answer.status == "400":
                self.record.bad.append(f"bystander: {answer.text[:200]} ({prompt[:40]!r})")
            elif answer.status == "200" and expected and (text := text_of(answer.text)) != expected:
                self.record.bad.append(f"bystander: {text!r} for {expected!r} ({prompt!r} at {url or 'the first server'})")
            await asyncio.sleep(BYSTANDER_SECONDS)

    async def _sample_memory(self) -> None:
        while True:
            server_id = self._server.process.pid
            for name, process_id in (("front end", server_id), ("worker", find_worker(server_id))):
                megabytes = resident_mb(process_id) if process_id is not None else 0.0
                if megabytes:
                    self.record.memory[name].append(megabytes)
            await asyncio.sleep(MEMORY_SECONDS)


def bystanders_body(model: str, prompt: str) -> dict[str, Any]:
    """A greedy request, whose session both servers save."""
    return {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "session_id": f"conversation {len(prompt)}"}


def text_of(answer: str) -> str:
    """The text of a completion; what the server sent if it is none."""
    try:
        return str(json.loads(answer)["choices"][0]["text"])
    except (ValueError, LookupError, TypeError):
        return answer
