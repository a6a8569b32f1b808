"""A client with another key, which uses the first server as no client should."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter

import httpx

from bench.hostile.answers import read
from bench.hostile.bombs import large_bodies, masks
from bench.hostile.connections import HOLDS, HeldConnections
from bench.hostile.target import Target

PAUSE_SECONDS = 0.5  # between two attacks
PATIENCE_SECONDS = 5.0  # for an answer


class Intruder:
    """Streams that nobody reads, bodies that never end, large bodies, and grammars whose masks are slow."""

    def __init__(self, target: Target, seconds: float) -> None:
        self._target = target
        self._end = time.perf_counter() + seconds
        self._held = HeldConnections(target)
        self.counts: Counter[str] = Counter()
        self.bad: list[str] = []

    async def run(self, client: httpx.AsyncClient) -> None:
        headers = {"Authorization": f"Bearer {self._target.keys[0]}", "Content-Type": "application/json"}
        bombs = [*masks(), *large_bodies()]
        for (name, content), bomb in zip(itertools.cycle(HOLDS.items()), itertools.cycle(bombs), strict=False):
            if time.perf_counter() >= self._end:
                break
            self.counts[f"{name}: {await self._held.hold(content(self._target))}"] += 1
            body = await asyncio.to_thread(bomb.body, self._target)
            url = f"{self._target.url}{bomb.path}"
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    answer = await read(client, "POST", url, content=body, headers=headers)
                self.counts[f"{bomb.kind}: {answer.status}"] += 1
                self.bad += [fault] if (fault := answer.fault(kills=True)) else []
            except TimeoutError:
                self.counts[f"{bomb.kind}: left"] += 1
            await asyncio.sleep(PAUSE_SECONDS)
        self._held.close()
