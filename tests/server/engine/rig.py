"""An engine over a fake worker, as the tests of the engine run it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outrider.server.engine.engine import Engine
from outrider.server.engine.messages import Event, Request, TokenEvent, ToWorker
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.sampling_params import SamplingParams
from tests.server.engine.fakes import READY, FakeProcess, Launcher


class Rig:
    """An engine, its fake worker, and the reported failures."""

    def __init__(self, **settings: Any) -> None:
        self.engine = Engine(load_settings(None, settings), Metrics())
        self.launcher = Launcher()
        self.engine._supervisor._launch = self.launcher
        self.failures: list[str] = []

    @property
    def worker(self) -> FakeProcess:
        return self.launcher.started[-1]

    async def start(self, ready: bool = True) -> None:
        self.engine.adopt(self.launcher(load_settings()))
        await self.engine.start(self.failures.append)
        if ready:
            self.worker.send(READY)
            assert await self.engine.wait_started() == READY

    async def received(self, count: int = 1) -> list[ToWorker]:
        """The next messages that the worker receives, at least `count`."""
        found: list[ToWorker] = []
        async with asyncio.timeout(5):
            while len(found) < count:
                found += await asyncio.to_thread(self.worker.receive)
        return found

    async def answer(self, id: str, **fields: Any) -> list[str]:
        """A request's events, as `written`."""
        return [written(each) async for each in self.engine.generate(request(id, **fields))]


def written(event: Event | None) -> str:
    """The text of an event; "-" for a keep-alive, "+" when the worker has the request."""
    return event.text if isinstance(event, TokenEvent) else "-" if event is None else "+"


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(**settings)
    yield rig
    await rig.engine.stop()


def request(id: str, **fields: Any) -> Request:
    return Request(id, [1, 2, 3], SamplingParams(), 5, **fields)


def event(id: str, text: str, last: bool = False) -> TokenEvent:
    return TokenEvent(id, [7], text, "stop" if last else None)
