"""Bodies that are being received have a bound for all clients and for each; those that never end keep no others waiting."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI, Request

from outrider.server.http import errors
from outrider.server.http.body_budget import SMALL_BYTES, BodyBudget
from outrider.server.http.middleware import BodyLimit

LARGE = 1 << 20


async def test_a_client_that_fills_its_share_keeps_no_other_waiting() -> None:
    budget = BodyBudget(total_bytes=100, client_bytes=40)
    assert [await budget.take("mallory", 20) for _ in range(2)] == [20, 20]
    third = asyncio.create_task(budget.take("mallory", 20))
    await asyncio.sleep(0)
    assert not third.done() and await budget.take("bob", 400) == 40  # as much as a client may have
    late = asyncio.create_task(budget.take("carol", 30))
    await asyncio.sleep(0)
    assert not late.done()  # 80 of 100
    budget.give("mallory", 20)
    assert await third == 20
    budget.give("bob", 40)
    assert await late == 30
    budget.give("carol", 30)
    budget.give("mallory", 20)
    budget.give("mallory", 20)
    assert not budget._held


async def test_a_body_whose_client_leaves_gives_its_room_back() -> None:
    for steps in range(4):
        budget = BodyBudget(total_bytes=10, client_bytes=10)
        await budget.take("a", 10)
        waiting = asyncio.create_task(budget.take("a", 10))
        await asyncio.sleep(0)
        if steps % 2:
            budget.give("a", 10)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if not steps % 2:
            budget.give("a", 10)
        assert not budget._held


def app_of(budget: BodyBudget, seconds: float = 5) -> FastAPI:
    app = FastAPI()
    app.add_middleware(BodyLimit, limit_bytes=8 << 20, limit_seconds=seconds, budget=budget)
    errors.install(app)

    @app.post("/")
    async def length(http: Request) -> int:
        return len(await http.body())

    return app


async def endless(open_bytes: list[int], gate: asyncio.Event) -> AsyncIterator[bytes]:
    for _ in range(LARGE // SMALL_BYTES):
        open_bytes[0] += SMALL_BYTES
        yield b"x" * SMALL_BYTES
    await gate.wait()
    yield b"x"


async def test_bodies_that_never_end_are_read_only_as_far_as_there_is_room() -> None:
    """200 bodies of one client; another one's is answered meanwhile, and small ones always."""
    budget = BodyBudget()
    app, read, gate = app_of(budget), [0], asyncio.Event()

    def client(address: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None)

    async with client("1.1.1.1") as mallory, client("2.2.2.2") as bob:
        open_bodies = [asyncio.create_task(mallory.post("/", content=endless(read, gate))) for _ in range(200)]
        before = -1
        while before != read[0]:  # until nothing more is read
            before = read[0]
            for _ in range(100):
                await asyncio.sleep(0)
        assert read[0] <= 200 * SMALL_BYTES + (16 << 20) and budget._held.total() <= 16 << 20
        assert (await bob.post("/", content=b"x" * LARGE)).json() == LARGE
        assert (await mallory.post("/", content=b"x" * 10)).json() == 10
        gate.set()
        answers = await asyncio.gather(*open_bodies)
    assert {answer.status_code for answer in answers} == {200} and not budget._held


def test_a_body_that_gets_no_room_in_time_is_refused() -> None:
    async def run() -> Any:
        budget = BodyBudget(total_bytes=LARGE, client_bytes=LARGE)
        await budget.take("another", LARGE)
        transport = httpx.ASGITransport(app_of(budget, seconds=0.05))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/", content=b"x" * LARGE)

    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_bodies")
