"""An HTTP client that times many concurrent requests in one event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_SECONDS = 120.0


@dataclass
class Outcome:
    """Result of one request."""

    status: int = 0  # 0 = no response
    started: float = 0.0  # time.perf_counter()
    seconds: float = 0.0
    first_token: float = 0.0  # seconds from the start
    gaps: list[float] = field(default_factory=list)  # between packets, seconds
    tokens: list[int] = field(default_factory=list)  # ids
    error: str = ""  # message of an error in the stream, or name of a connection error

    @property
    def answered(self) -> bool:
        """Whether the answer is complete."""
        return self.status == 200 and not self.error


async def stream(client: httpx.AsyncClient, fields: dict[str, Any], disconnect_after: int | None = None) -> Outcome:
    """Sends a streaming completion request; disconnects after `disconnect_after` packets if given."""
    outcome = Outcome(started=time.perf_counter())
    arrivals: list[float] = []
    try:
        body = fields | {"stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            outcome.status = response.status_code
            if outcome.status != 200:
                await response.aread()
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    arrivals.append(time.perf_counter())
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        outcome.error = chunk["error"]["message"]
                    for choice in chunk.get("choices", ()):
                        outcome.tokens += choice.get("token_ids") or ()
                    if disconnect_after is not None and len(arrivals) >= disconnect_after:
                        break
    except httpx.HTTPError as error:
        outcome.error = type(error).__name__
    outcome.seconds = time.perf_counter() - outcome.started
    if arrivals:
        outcome.first_token = arrivals[0] - outcome.started
        outcome.gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return outcome


async def complete(client: httpx.AsyncClient, fields: dict[str, Any]) -> Outcome:
    """Sends a completion request that is not streamed."""
    outcome = Outcome(started=time.perf_counter())
    try:
        response = await client.post("/v1/completions", json=fields | {"return_token_ids": True})
        outcome.status = response.status_code
        if outcome.status == 200:
            outcome.tokens = response.json()["choices"][0]["token_ids"]
    except httpx.HTTPError as error:
        outcome.error = type(error).__name__
    outcome.seconds = time.perf_counter() - outcome.started
    return outcome


def new_client(url: str) -> httpx.AsyncClient:
    """A client without a limit on concurrent connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """A metric's value from /metrics, summed over its labels."""
    response = await client.get("/metrics")
    response.raise_for_status()
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", response.text, re.MULTILINE)
    return sum(map(float, values))


async def served_model(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def sleep_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` reaches the deadline."""
    await asyncio.sleep(max(0.0, deadline - time.perf_counter()))
