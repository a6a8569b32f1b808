"""A replica over a fake worker: events in order, bounded, and cancelled with their reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

from outrider.server.engine.engine import MAX_UNREAD_EVENTS, Engine
from outrider.server.engine.messages import Cancel, Pause, Request, Resume, TokenEvent, ToWorker
from outrider.server.ray import wire
from outrider.server.ray.replica import ModelReplica
from outrider.server.settings import load_settings
from outrider.server.settings.plain import encode_settings
from outrider.verify.sampling_params import SamplingParams
from tests.server.engine.fakes import READY, FakeProcess, Launcher

REQUEST = Request("a", [1, 2], SamplingParams(), 500)
CALL = wire.encode(wire.Call(REQUEST, 0.0, False))


def run(body: Callable[[ModelReplica, FakeProcess], Awaitable[None]]) -> None:
    async def main() -> None:
        replica, launcher = ModelReplica(encode_settings(load_settings())), Launcher()
        engine = cast(Engine, replica._engine)
        engine._supervisor._launch = launcher
        starting = asyncio.ensure_future(replica.start())
        async with asyncio.timeout(5):
            while not launcher.started:
                await asyncio.sleep(0.001)
            launcher.started[0].send(READY)
            await starting
        await body(replica, launcher.started[0])
        await replica.stop()

    asyncio.run(main())


async def received(worker: FakeProcess) -> ToWorker:
    async with asyncio.timeout(5):
        while not (found := await asyncio.to_thread(worker.receive)):
            pass
    return found[0]


def event(text: str, **fields: Any) -> TokenEvent:
    return TokenEvent("a", [1], text, **fields)


async def start(batches: AsyncGenerator[bytes, None], worker: FakeProcess) -> None:
    """Begins to read the answer, up to its first event."""
    first = asyncio.ensure_future(anext(batches))
    await received(worker)
    worker.send(event("x"))
    await first


def test_a_reader_that_leaves_cancels_the_request() -> None:
    async def body(replica: ModelReplica, worker: FakeProcess) -> None:
        async with aclosing(replica.generate(CALL)) as batches:
            await start(batches, worker)
        assert await received(worker) == Cancel("a")

    run(body)


def test_a_request_whose_events_are_not_read_is_paused() -> None:
    async def body(replica: ModelReplica, worker: FakeProcess) -> None:
        async with aclosing(replica.generate(CALL)) as batches:
            await start(batches, worker)
            for _ in range(2 * MAX_UNREAD_EVENTS + 1):  # as many as the replica holds, and as many as its engine does
                worker.send(event("y"))
            assert await received(worker) == Pause("a")
            count = 0
            while count < 2 * MAX_UNREAD_EVENTS + 1:
                count += len(wire.decode_batch(await anext(batches)))
            assert await received(worker) == Resume("a")

    run(body)
