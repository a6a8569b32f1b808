"""The front end's side of the worker: starts the process, queues requests, and hands each its events.

Promises that the event loop never blocks on the worker, that the queue is bounded, and that a request whose reader goes
away is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import zmq
import zmq.asyncio

from server import messages, worker
from server.messages import Cancel, Failed, Ready, Refused, Request, Shutdown, Status, TokenEvent, ToWorker
from server.metrics import Metrics
from server.settings import Settings

log = logging.getLogger("outrider")
POLL_SECONDS = 0.5
STOP_SECONDS = 5.0


class EngineError(RuntimeError):
    """A request cannot be answered; the message may be shown to the client."""


class Overloaded(EngineError):
    """The queue is full."""


class WorkerLost(EngineError):
    """The worker is gone."""


class Engine:
    """Owns the worker process. `start`, then `generate` as often as wanted, then `stop`."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._streams: dict[str, asyncio.Queue[TokenEvent | EngineError]] = {}
        self._running: set[str] = set()
        self._turn = asyncio.Semaphore(settings.scheduling.max_active)
        self._ready = asyncio.Event()
        self._waiting = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.info: Ready | None = None
        self.failure: str | None = None  # why there is no worker, one sentence

    @property
    def ready(self) -> bool:
        """The worker has loaded and is alive."""
        return self._ready.is_set() and self.failure is None

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """Spawns the worker; returns at once, `ready` becomes true when it has loaded. `on_failure` is told if it is lost."""
        self._on_failure = on_failure
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-")
        addresses = [f"ipc://{Path(self._folder.name) / name}" for name in ("to-worker", "from-worker")]
        self._context = zmq.asyncio.Context()
        self._outbox, self._inbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._outbox.bind(addresses[0])
        self._inbox.bind(addresses[1])
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=worker.main, args=(self._settings, *addresses), name="outrider-worker", daemon=True
        )
        self._process.start()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """Ends the worker and everything that waits for it."""
        for task in self._tasks:
            task.cancel()
        if self._process.is_alive() and self.info is not None:  # one that is loading does not listen
            await self._send(Shutdown())
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def wait_ready(self) -> None:
        """Returns when the worker has loaded; raises WorkerLost where it cannot."""
        await self._ready.wait()
        if self.failure is not None:
            raise WorkerLost(self.failure)

    async def generate(self, request: Request, admitted: bool = False) -> AsyncGenerator[TokenEvent, None]:
        """The request's events as they come, the first one when its turn has come. Raises EngineError.

        Close the iterator (or leave it) to cancel the request. With `admitted`, a full queue is no reason to refuse it.
        """
        if not admitted and self._waiting >= self._settings.scheduling.max_waiting and self._turn.locked():
            self._metrics.rejected_requests.labels("queue_full").inc()
            raise Overloaded("The server is busy and its queue is full; try again shortly.")
        arrived = time.monotonic()
        await self._wait_for_turn()
        self._running.add(request.id)
        self._metrics.running.inc()
        self._metrics.queue.observe(time.monotonic() - arrived)
        stream = self._streams[request.id] = asyncio.Queue()
        finished = False
        try:
            await self.wait_ready()  # the worker may have been lost meanwhile
            await self._send(request)
            while not finished:
                event = await stream.get()
                finished = isinstance(event, EngineError) or event.last
                if isinstance(event, EngineError):
                    raise event
                yield event
        finally:
            del self._streams[request.id]
            self._end_turn(request.id)
            if not finished:
                await self._send(Cancel(request.id))

    async def _wait_for_turn(self) -> None:
        """Returns when the worker is there and has room; counts who waits."""
        self._waiting += 1
        self._metrics.waiting.set(self._waiting)
        try:
            await self.wait_ready()
            await self._turn.acquire()
        finally:
            self._waiting -= 1
            self._metrics.waiting.set(self._waiting)

    def _end_turn(self, request_id: str) -> None:
        """Makes room for the next request, once: when the worker is done with this one, however slowly its client reads."""
        if request_id in self._running:
            self._running.remove(request_id)
            self._turn.release()
            self._metrics.running.dec()

    async def _send(self, message: ToWorker) -> None:
        """Never waits: a message to a worker that is gone is dropped, its loss is noticed elsewhere."""
        with contextlib.suppress(zmq.Again):
            await self._outbox.send(messages.encode(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            message = messages.decode_from_worker(await self._inbox.recv())
            self._metrics.last_progress.set(time.time())
            match message:
                case Ready():
                    self.info = message
                    self._ready.set()
                    kept = f"{message.slots} contexts of {message.slot_bytes / 1e6:.0f} MB"
                    log.info("ready after %.1f s: %s on %s, %s", message.seconds, message.dtype, message.device, kept)
                case Refused():
                    self._lose(message.message)
                case Status():
                    self._metrics.saw_status(message)
                case Failed():
                    self._deliver(message.id, EngineError(message.message))
                case TokenEvent():
                    self._deliver(message.id, message)

    def _deliver(self, request_id: str, event: TokenEvent | EngineError) -> None:
        if isinstance(event, EngineError) or event.last:
            self._end_turn(request_id)
        stream = self._streams.get(request_id)  # gone where the request was cancelled meanwhile
        if stream is not None:
            stream.put_nowait(event)

    async def _watch(self) -> None:
        """Notices a worker that died."""
        while self._process.is_alive():
            await asyncio.sleep(POLL_SECONDS)
        self._lose(f"The worker process ended unexpectedly (exit code {self._process.exitcode}).")

    def _lose(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
            self._on_failure(why)
        self._ready.set()  # nobody shall wait for ever
        for stream in self._streams.values():
            stream.put_nowait(WorkerLost("The worker stopped; try again shortly."))
