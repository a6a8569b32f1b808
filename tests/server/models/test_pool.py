"""When models are loaded and unloaded. The models are counters; tests/integration/test_several_models.py has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import pytest

from outrider.server.engine.engine import WorkerLost
from outrider.server.http.errors import APIError
from outrider.server.models import pool as module
from outrider.server.models.catalog import Entry
from outrider.server.models.pool import WORKER_BYTES, Pool
from outrider.server.settings import load_settings

SIZE = 1 << 30
ROOM = WORKER_BYTES + int(module.PACKED_SHARE * SIZE)  # of one model


class Counted:
    kind = None

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.failure = machine, name, None

    def drain(self) -> None:
        self.machine.events.append(f"drain {self.name}")

    def abort(self) -> None:
        self.machine.events.append(f"abort {self.name}")

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.machine.events.append(f"stop {self.name}")
        self.machine.free += ROOM


class Machine:
    """Has memory for some models."""

    def __init__(self, models: int) -> None:
        self.free = models * ROOM
        self.events: list[str] = []
        self.blocked = asyncio.Event()
        self.blocked.set()

    async def load(self, entry: Entry) -> Counted:
        self.events.append(f"load {entry.name}")
        await self.blocked.wait()
        if entry.name == "broken":
            raise WorkerLost("it is broken")
        self.free -= ROOM
        return Counted(self, entry.name)


@asynccontextmanager
async def running(room: int = 2, idle_seconds: float | None = None) -> AsyncIterator[tuple[Machine, Pool]]:
    """A machine, and a pool of the models a, b, c and broken."""
    machine = Machine(room)
    settings = [
        load_settings(None, {"model.path": name, f"model.adapters.{name}-sql": "folder", "model.aliases": ["gpt-*"]})
        for name in ("a", "b", "c", "broken")
    ]
    pool = Pool([Entry(each, SIZE) for each in settings], cast(Any, machine.load), lambda: machine.free, idle_seconds)
    async with asyncio.timeout(20):
        yield machine, pool


async def use(pool: Pool, name: str) -> None:
    async with pool.use(pool.find(name)) as loaded:
        assert cast(Counted, loaded).name == name


async def test_the_least_recently_used_model_makes_room() -> None:
    async with running() as (machine, pool):
        for name in ("a", "b", "a", "c", "a"):
            await use(pool, name)
    assert machine.events == ["load a", "load b", "stop b", "load c"]


async def test_requests_of_one_model_load_it_once_and_others_do_not_wait() -> None:
    async with running() as (machine, pool):
        await use(pool, "a")
        machine.blocked.clear()
        waiting = [asyncio.create_task(use(pool, "b")) for _ in range(3)]
        await asyncio.sleep(0.01)
        await use(pool, "a")
        waiting[0].cancel()  # a client that leaves does not stop the loading for the others
        machine.blocked.set()
        with suppress(asyncio.CancelledError):
            await waiting[0]
        await asyncio.gather(*waiting[1:])
    assert machine.events == ["load a", "load b"]


async def test_a_model_with_requests_is_not_unloaded() -> None:
    async with running(room=1) as (machine, pool):
        async with pool.use(pool.find("a")):
            waiting = asyncio.create_task(use(pool, "b"))
            await asyncio.sleep(0.01)
            assert not waiting.done()
        await waiting
    assert machine.events == ["load a", "stop a", "load b"]


async def test_a_request_without_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_SECONDS", 0.05)
    async with running(room=1) as (machine, pool):
        async with pool.use(pool.find("a")):
            with pytest.raises(APIError, match=r"b needs about 1\.9 GB, and 0\.0 are free") as raised:
                await use(pool, "b")
        assert raised.value.status_code == 503
    assert machine.events == ["load a"]


async def test_a_model_that_waits_for_room_keeps_no_other_one_from_loading() -> None:
    async with running(room=1) as (machine, pool):
        release = asyncio.Event()

        async def hold(name: str) -> None:
            async with pool.use(pool.find(name)):
                await release.wait()

        holding = asyncio.create_task(hold("a"))
        waiting = asyncio.create_task(use(pool, "b"))
        while not pool.models["b"].loading or "load a" not in machine.events:
            await asyncio.sleep(0)
        pool.models["c"].entry = replace(pool.models["c"].entry, size_bytes=0)
        machine.free += WORKER_BYTES
        await use(pool, "c")  # it fits, while b does not
        assert not waiting.done()
        release.set()
        await asyncio.gather(holding, waiting)
    events = machine.events
    assert events.index("load c") < events.index("load b")


async def test_a_request_says_how_long_its_model_stays() -> None:
    async with running() as (machine, pool):
        task = asyncio.create_task(pool.unload_idle())
        async with pool.use(pool.find("a"), 0.0):
            async with pool.use(pool.find("b"), 0.0):
                pass
            await use(pool, "b")  # the last request counts, and this one has the pool's time, which is none
        while machine.events[-1] != "stop a":
            await asyncio.sleep(0.01)
        task.cancel()
    assert "stop b" not in machine.events
