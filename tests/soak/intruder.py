"""A client with another key, which uses the server as no client should."""

import asyncio
import itertools
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from tests.integration.faults.test_raw_bytes import LINES
from tests.soak.bombs import Bomb, named_bombs
from tests.soak.connections import HOLDS, HeldConnections, Target, send_raw

PAUSE_SECONDS = 0.5  # between two attacks
PATIENCE_SECONDS = 5.0  # for an answer
HANG_UP_SECONDS = 0.1  # after sending a bomb whose client does not wait
HANG_SECONDS = 60.0
MOST_LINES = 6  # of a broken request
LOST = "worker_unavailable"  # the error code of a request whose worker was killed
STREAM_ERROR = re.compile(r'^data: (\{.*"error".*\})$', re.M)
KEPT_CHARACTERS = 2000  # of an answer, at its end


@dataclass(frozen=True)
class Answer:
    """An answer, or why there is none."""

    status: str  # code, "hangs", or the name of the client's error
    text: str = ""  # the end

    @property
    def fault(self) -> str | None:
        """What is wrong with it, if anything. Requests may be lost with their worker, which is killed at times."""
        if self.status == "hangs":
            return f"no answer within {HANG_SECONDS:g} s"
        if "Traceback" in self.text:
            return "a traceback in the answer"
        error = self.error
        failed = self.status.startswith("5") or error.get("type") in ("server_error", "service_unavailable_error")
        return f"{self.status} {self.text[:200]}" if failed and error.get("code") != LOST else None

    @property
    def error(self) -> dict[str, Any]:
        """The error in a body or in a stream's last events; empty if there is none."""
        found = STREAM_ERROR.findall(self.text)
        try:
            error = json.loads(found[-1] if found else self.text).get("error")
        except (ValueError, AttributeError, RecursionError):
            return {}
        return error if isinstance(error, dict) else {}


async def read(client: httpx.AsyncClient, url: str, body: bytes, key: str) -> Answer:
    """Posts a body and reads the whole answer."""
    end = ""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        async with client.stream("POST", url, timeout=HANG_SECONDS, content=body, headers=headers) as response:
            async for part in response.aiter_bytes():
                end = (end + part.decode("utf-8", "replace"))[-KEPT_CHARACTERS:]
    except httpx.TimeoutException:
        return Answer("hangs")
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        return Answer(type(failure).__name__)
    return Answer(str(response.status_code), end)


class Intruder:
    """Streams that nobody reads, bodies that never end, broken HTTP, and every named attack, in a fixed random order."""

    def __init__(self, target: Target, seconds: float) -> None:
        self._target = target
        self._seconds = seconds
        self._held = HeldConnections(target)
        self._rng = random.Random(0)
        self.counts: Counter[str] = Counter()
        self.round_seconds: float | None = None  # until every attack had been sent once
        self.bad: list[str] = []

    async def run(self, client: httpx.AsyncClient) -> None:
        """Attacks until the time is over."""
        bombs = named_bombs()
        self._rng.shuffle(bombs)
        started = time.perf_counter()
        turns = zip(*map(itertools.cycle, (HOLDS.items(), bombs)), strict=False)
        for number, ((name, content), bomb) in enumerate(turns):
            if time.perf_counter() >= started + self._seconds:
                break
            if number == len(bombs):
                self.round_seconds = time.perf_counter() - started
            self.counts[f"{name}: {await self._held.hold(content(self._target))}"] += 1
            broken = b"".join(self._rng.choices(LINES, k=self._rng.randint(1, MOST_LINES)))
            self._add("broken", Answer(await send_raw(self._target, broken)))
            await self._send(client, bomb)
            await asyncio.sleep(PAUSE_SECONDS)
        self._held.close()

    async def _send(self, client: httpx.AsyncClient, bomb: Bomb) -> None:
        body = await asyncio.to_thread(bomb.body, self._target)
        try:
            async with asyncio.timeout(HANG_UP_SECONDS if bomb.hangs_up else PATIENCE_SECONDS):
                self._add(bomb.kind, await read(client, f"{self._target.url}{bomb.path}", body, self._target.key))
        except TimeoutError:
            self.counts[f"{bomb.kind}: left"] += 1

    def _add(self, kind: str, answer: Answer) -> None:
        self.counts[f"{kind}: {answer.status}"] += 1
        if answer.fault is not None:
            self.bad.append(f"{kind}: {answer.fault}")
