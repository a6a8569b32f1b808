"""A replica over a fake worker: events in order, bounded, and cancelled with their reader; and what crosses the wire."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from outrider.server.engine.engine import (
    MAX_UNREAD_EVENTS,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    WorkerLost,
)
from outrider.server.engine.messages import Cancel, Pause, Request, Resume, TokenEvent, ToWorker
from outrider.server.ray import wire
from outrider.server.ray.replica import ModelReplica
from outrider.server.settings import load_settings
from outrider.server.settings.tree import encode_settings
from outrider.verify.sampling_params import SamplingParams
from tests.server.engine.rig import READY, FakeProcess, Launcher

REQUEST = Request("a", [1, 2], SamplingParams(), 500)
CALL = wire.encode(wire.Call(REQUEST, 0.0, False))


@asynccontextmanager
async def running() -> AsyncIterator[tuple[ModelReplica, FakeProcess]]:
    replica, launcher = ModelReplica(encode_settings(load_settings())), Launcher()
    engine = replica._engine
    engine._supervisor._launch = launcher
    starting = asyncio.ensure_future(replica.start())
    async with asyncio.timeout(5):
        while not launcher.started:
            await asyncio.sleep(0.001)
        launcher.started[0].send(READY)
        await starting
    yield replica, launcher.started[0]
    await replica.stop()


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


async def test_a_reader_that_leaves_cancels_the_request() -> None:
    async with running() as (replica, worker):
        async with aclosing(replica.generate(CALL)) as batches:
            await start(batches, worker)
        assert await received(worker) == Cancel("a")


async def test_a_request_whose_events_are_not_read_is_paused() -> None:
    async with running() as (replica, worker), aclosing(replica.generate(CALL)) as batches:
        await start(batches, worker)
        for _ in range(2 * MAX_UNREAD_EVENTS + 1):  # as many as the replica holds, and as many as its engine does
            worker.send(event("y"))
        assert await received(worker) == Pause("a")
        count = 0
        while count < 2 * MAX_UNREAD_EVENTS + 1:
            count += len(wire.decode_batch(await anext(batches)))
        assert await received(worker) == Resume("a")


EVENT = TokenEvent("a", [1, 2], "text")


def test_a_call_arrives_as_it_was_sent() -> None:
    call = wire.Call(Request("a", [1, 2], SamplingParams(seed=3), 5, session="s", affinity="x"), 0.5, True)
    assert wire.decode_call(wire.encode(call)) == call


@pytest.mark.parametrize("kind", [EngineError, InvalidRequest, WorkerLost, DeadlineExceeded])
def test_an_error_keeps_its_type_and_message(kind: type[EngineError]) -> None:
    event, error = wire.decode_batch(wire.encode_batch([EVENT, kind("why")]))
    assert (event, type(error), str(error)) == (EVENT, kind, "why")


def test_an_overload_says_when_to_retry() -> None:
    (error,) = wire.decode_batch(wire.encode_batch([Overloaded("full", "tokens", 2.5)]))
    assert isinstance(error, Overloaded)
    assert (str(error), error.reason, error.seconds) == ("full", "tokens", 2.5)
