"""The intruder uses a server in every way that no client should, and reports what should not have been answered."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.soak import intruder
from tests.soak.attacks.bombs import Bomb, large_bodies, masks
from tests.soak.attacks.connections import HOLDS
from tests.soak.attacks.targets import target
from tests.soak.intruder import Intruder

KINDS = ("masks", "large body")


@pytest.mark.parametrize(("status", "is_bad"), [(429, False), (500, True)])
def test_every_attack_is_sent(monkeypatch: pytest.MonkeyPatch, status: int, is_bad: bool) -> None:
    bombs: list[Bomb] = [*masks(), *large_bodies()]
    monkeypatch.setattr(intruder, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(intruder, "named_bombs", lambda: bombs)
    asked: set[str] = set()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.add(request.url.path)
        return httpx.Response(status, json={"error": {"type": "server_error" if is_bad else "busy"}})

    async def run() -> Intruder:
        attacks = Intruder(target(), 2.0)
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await attacks.run(client)
        return attacks

    done = asyncio.run(run())
    assert {f"{kind}: {status}" for kind in KINDS} <= done.counts.keys()
    assert {"broken: refused", *(f"{name}: refused" for name in HOLDS)} <= done.counts.keys()  # nobody listens
    assert {"/v1/completions", "/v1/messages", "/v1/responses"} <= asked and bool(done.bad) == is_bad
