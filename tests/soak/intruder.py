"""A client with another key, which uses the first server as no client should."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter

import httpx

from tests.soak.attacks.answers import Answer, read
from tests.soak.attacks.bombs import Bomb, named_bombs
from tests.soak.attacks.connections import HOLDS, HeldConnections, broken_requests, send_raw
from tests.soak.attacks.target import Target

PAUSE_SECONDS = 0.5  # between two attacks
PATIENCE_SECONDS = 5.0  # for an answer
HANG_UP_SECONDS = 0.1  # after sending a bomb whose client does not wait
LOCATION = re.compile(rb"^location: *([^\r\n]*)", re.I | re.M)


class Intruder:
    """Streams that nobody reads, bodies that never end, broken HTTP, and every named attack, in a fixed random order."""

    def __init__(self, target: Target, seconds: float) -> None:
        self._target = target
        self._end = time.perf_counter() + seconds
        self._held = HeldConnections(target)
        self.counts: Counter[str] = Counter()
        self.round_seconds: float | None = None  # until every attack had been sent once
        self.bad: list[str] = []

    async def run(self, client: httpx.AsyncClient) -> None:
        """Attacks until the time is over."""
        bombs = named_bombs()
        random.Random(0).shuffle(bombs)
        started = time.perf_counter()
        turns = zip(*map(itertools.cycle, (HOLDS.items(), broken_requests(self._target), bombs)), strict=False)
        for number, ((name, content), broken, bomb) in enumerate(turns):
            if time.perf_counter() >= self._end:
                break
            if number == len(bombs):
                self.round_seconds = time.perf_counter() - started
            self.counts[f"{name}: {await self._held.hold(content(self._target))}"] += 1
            status, head = await send_raw(self._target, broken)
            location = LOCATION.search(head)
            self._add("broken", Answer(status, location=location[1].decode("latin-1") if location else ""))
            await self._send(client, bomb)
            await asyncio.sleep(PAUSE_SECONDS)
        self._held.close()

    async def _send(self, client: httpx.AsyncClient, bomb: Bomb) -> None:
        headers = {"Authorization": f"Bearer {self._target.keys[0]}", "Content-Type": "application/json"}
        body = await asyncio.to_thread(bomb.body, self._target)
        try:
            async with asyncio.timeout(HANG_UP_SECONDS if bomb.hangs_up else PATIENCE_SECONDS):
                url = f"{self._target.url}{bomb.path}"
                self._add(bomb.kind, await read(client, "POST", url, content=body, headers=headers))
        except TimeoutError:
            self.counts[f"{bomb.kind}: left"] += 1

    def _add(self, kind: str, answer: Answer) -> None:
        self.counts[f"{kind}: {answer.status}"] += 1
        fault = answer.fault(kills=True)
        if fault is not None:
            self.bad.append(f"{kind}: {fault}")
