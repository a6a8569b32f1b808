"""An engine over a fake worker: the worker's end of the socket is controlled by the test."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

from outrider.server.engine import messages
from outrider.server.engine.engine import Engine
from outrider.server.engine.messages import Event, FromWorker, Memory, Ready, Request, TokenEvent, ToWorker
from outrider.server.engine.transport import WorkerSide
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.settings import Settings, load_settings
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.sampling_params import SamplingParams

READY = Ready(
    context_tokens=100,
    device="cpu",
    dtype="float32",
    seconds=0.1,
    slots=2,
    max_active=2,
    slot_bytes=1000,
    invariance="off",
    weight_bits=32.0,
    kv_dtype="float32",
    memory=Memory(10, 20, 2000, None),
)


class FakeProcess:
    """Stands in for a WorkerProcess; a test plays the worker through `receive`, `send` and `die`."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._wire = WorkerSide(theirs)
        self.exit_code: int | None = None
        self.pid = 0  # of no process

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def wait(self, seconds: float) -> None:
        """Returns at once: a fake has no process to wait for."""

    def kill(self) -> None:
        if self.alive:
            self.die(-9)

    def close(self) -> None:
        self.kill()
        self.socket.close()

    def die(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._wire.close()

    def send(self, message: FromWorker) -> None:
        self._wire.send(messages.encode(message))

    def receive(self) -> list[ToWorker]:
        return [messages.decode_to_worker(data) for data in self._wire.receive(0.01)]


class Launcher:
    """Starts fake workers and records them in order. Raises `errors` first, if a test sets them."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.errors: Iterator[Exception] = iter(())

    def __call__(self, settings: Settings) -> WorkerProcess:
        if error := next(self.errors, None):
            raise error
        self.started.append(FakeProcess())
        return cast(WorkerProcess, self.started[-1])


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
