"""The quotas of an ingress: only keys with a quota ask the coordinator."""

from __future__ import annotations

import asyncio

import pytest

from outrider.server.ray.shared_quotas import SharedQuotas
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics


class FakeCounts:
    """Refuses everything after `free` requests."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.charged = 0

    async def admit(self, principal: str, seconds_per_request: float) -> tuple[str, str, float] | None:
        self.free -= 1
        return None if self.free >= 0 else ("concurrency", "Too many.", seconds_per_request)

    async def release(self, principal: str) -> None:
        self.free += 1

    def charge(self, principal: str, requests: int) -> None:
        self.charged += requests


class SlowCounts(FakeCounts):
    """Takes some turns of the event loop before and after it counts."""

    async def admit(self, principal: str, seconds_per_request: float) -> tuple[str, str, float] | None:
        await asyncio.sleep(0)
        refusal = await super().admit(principal, seconds_per_request)
        if refusal is not None:
            self.free += 1  # a refused request is not counted
        await asyncio.sleep(0)
        return refusal


@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize("turns", range(8))
async def test_a_client_that_hangs_up_at_any_moment_leaves_no_place(turns: int, free: int) -> None:
    counts = SlowCounts(free)
    auth = load_settings(None, {"auth.max_concurrent": 1}).auth
    quotas = SharedQuotas(auth, Metrics(), counts, lambda: 1.0)

    async def request() -> None:
        await quotas.admit("alice")
        try:
            await asyncio.sleep(0)
        finally:
            await quotas.release("alice")

    running = asyncio.create_task(request())
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (quotas.held["alice"], counts.free) == (0, free)
