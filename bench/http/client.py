"""A client for load: asks, streams, measures; many at once in one event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_SECONDS = 120.0


@dataclass
class Outcome:
    """What became of one request."""

    status: int = 0  # 0 = no answer
    started: float = 0.0  # time.perf_counter()
    seconds: float = 0.0
    first_token: float = 0.0  # seconds
    gaps: list[float] = field(default_factory=list)  # between packets, seconds
    tokens: list[int] = field(default_factory=list)
    error: str = ""  # in the stream, or of the connection

    @property
    def answered(self) -> bool:
        """Wholly."""
        return self.status == 200 and not self.error


async def stream(client: httpx.AsyncClient, fields: dict[str, Any], leave_after: int | None = None) -> Outcome:
    """One streamed completion; with `leave_after`, the client goes away after so many packets."""
    out = Outcome(started=time.perf_counter())
    arrivals: list[float] = []
    try:
        body = fields | {"stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            out.status = response.status_code
            if out.status != 200:
                await response.aread()
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    arrivals.append(time.perf_counter())
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        out.error = chunk["error"]["message"]
                    for choice in chunk.get("choices", ()):
                        out.tokens += choice.get("token_ids") or ()
                    if leave_after is not None and len(arrivals) >= leave_after:
                        break
    except httpx.HTTPError as error:
        out.error = type(error).__name__
    out.seconds = time.perf_counter() - out.started
    if arrivals:
        out.first_token = arrivals[0] - out.started
        out.gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return out


async def whole(client: httpx.AsyncClient, fields: dict[str, Any]) -> Outcome:
    """One completion that comes in one piece."""
    out = Outcome(started=time.perf_counter())
    try:
        response = await client.post("/v1/completions", json=fields | {"return_token_ids": True})
        out.status = response.status_code
        if out.status == 200:
            out.tokens = response.json()["choices"][0]["token_ids"]
    except httpx.HTTPError as error:
        out.error = type(error).__name__
    out.seconds = time.perf_counter() - out.started
    return out


def new_client(url: str) -> httpx.AsyncClient:
    """For any number of requests at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """A metric's value, summed over its labels."""
    text = (await client.get("/metrics")).text
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def model_of(client: httpx.AsyncClient) -> str:
    """The name of the served model."""
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


def quantiles(values: Sequence[float], unit: float = 1e3) -> dict[str, float]:
    """p50, p90, p99 and the largest, in milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    picked = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)}
    return {name: round(unit * value, 2) for name, value in (picked | {"max": ordered[-1]}).items()}


def children(process_id: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for each in tasks for child in each.read_text().split()]


def worker_of(process_id: int) -> int | None:
    """The worker of a server, by the way it was started; None while there is none."""
    for child in children(process_id):
        try:
            if b"server.worker.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        except OSError:
            continue
    return None


def resident_mb(process_id: int) -> float:
    """Of a process's memory, what is its own: without the pages of files that it has mapped."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


async def until(deadline: float) -> None:
    """Sleeps until a time of time.perf_counter()."""
    await asyncio.sleep(max(0.0, deadline - time.perf_counter()))
