"""The front end's side of the worker: queues requests, and hands each its events.

Promises that the event loop never blocks on the worker, that the queue is bounded, that a request whose reader goes away is
cancelled, that the loss of a worker ends the requests at work with an error and no others, and that every request ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack

from server.engine.messages import Cancel, Failed, FromWorker, Ready, Request, Status, TokenEvent
from server.engine.queue import Queue, QueueFull
from server.engine.quotas import Quotas
from server.engine.supervisor import Supervisor
from server.settings import Settings
from server.telemetry.metrics import Metrics

log = logging.getLogger("outrider")


class EngineError(RuntimeError):
    """A request cannot be answered; the message may be shown to the client."""


class Overloaded(EngineError):
    """There is no room, or the key has used up what it may. Come again after `seconds`."""

    def __init__(self, message: str, reason: str, seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.seconds = seconds


class Impossible(EngineError):
    """The request itself asks for what cannot be done."""


class Unavailable(EngineError):
    """Not now; `code` says why in a word."""

    code = "unavailable"


class WorkerLost(Unavailable):
    """The worker is gone."""

    code = "worker_unavailable"


class DeadlineExceeded(Unavailable):
    """The request has taken longer than the settings allow."""

    code = "deadline_exceeded"


class ShuttingDown(Unavailable):
    """The server is about to end."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down; try again shortly.")


class Engine:
    """Owns the queue and the worker's keeper. `start`, then `generate` as often as wanted, then `stop`."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._beat_seconds = settings.server.keep_alive_seconds
        self._metrics = metrics
        self._limits = limits = settings.scheduling
        self._queue = Queue(limits.max_active, limits.max_waiting, limits.max_waiting_tokens)
        self._quotas = Quotas(settings.auth)
        self._streams: dict[str, asyncio.Queue[TokenEvent | EngineError]] = {}
        self._supervisor = Supervisor(settings, self._take, self._lost, self._failed)
        self._started = asyncio.Event()  # a worker has been ready, or none ever will be
        self.info: Ready | None = None  # of the last worker that got ready
        self.ready = False  # the worker has loaded and is alive
        self._draining = False  # no new requests
        self.failure: str | None = None  # why there is no worker and will be none, one sentence

    @property
    def state(self) -> str:
        """One word: ready, loading (the first worker), restarting (another one), draining, or failed."""
        if self.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "ready" if self.ready else "restarting" if self.info else "loading"

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """Spawns the worker; returns at once, `ready` becomes true when it has loaded. `on_failure` is told if it cannot."""
        self._on_failure = on_failure
        await self._supervisor.start()
        self._supervisor.watch(lambda: self.ready and self._queue.active > 0)

    async def stop(self) -> None:
        """Ends the worker."""
        await self._supervisor.stop()

    def drain(self) -> None:
        """From now on, new requests are refused; those that are here go on."""
        self._draining = True

    def abort(self) -> None:
        """Ends all requests with an error."""
        self._queue.fail(ShuttingDown())
        for request_id in list(self._streams):
            self._deliver(request_id, ShuttingDown())

    async def wait_started(self) -> Ready:
        """What the worker is like, once one has loaded. Raises WorkerLost where none can."""
        await self._started.wait()
        if self.failure is not None:
            raise WorkerLost(self.failure)
        assert self.info is not None
        return self.info

    async def generate(self, request: Request, admitted: bool = False) -> AsyncGenerator[TokenEvent | None, None]:
        """The request's events as they come, and None whenever none came for the keep-alive time. Raises EngineError.

        Close the iterator (or leave it) to cancel the request. With `admitted`, a full queue is no reason to refuse it.
        """
        arrived = time.monotonic()
        with ExitStack() as held:
            turn = self._enter(request, admitted, held)
            finished = sent = False
            stream = self._streams[request.id] = asyncio.Queue()
            try:
                self._metrics.record_queue(self._queue)
                while not turn.done():
                    await asyncio.wait({turn}, timeout=self._patience(arrived, self._limits.queue_seconds))
                    if not turn.done():
                        yield None
                turn.result()  # raises where there will be no worker
                self._metrics.record_queue(self._queue)
                self._metrics.queue.observe(time.monotonic() - arrived)
                self._supervisor.send(request)
                sent = True
                while not finished:
                    try:
                        async with asyncio.timeout(self._patience(arrived, self._limits.request_seconds)):
                            event = await stream.get()
                    except TimeoutError:
                        yield None
                        continue
                    finished = isinstance(event, EngineError) or event.last
                    if isinstance(event, EngineError):
                        raise event
                    yield event
            finally:
                del self._streams[request.id]
                self._leave(request.id)
                if sent and not finished:
                    self._supervisor.send(Cancel(request.id))

    def _enter(self, request: Request, admitted: bool, held: ExitStack) -> asyncio.Future[None]:
        """The request's turn; what it holds meanwhile is released with `held`. Raises EngineError."""
        if self._draining:
            self._metrics.rejected_requests.labels("draining").inc()
            raise ShuttingDown
        principal, tokens = request.principal, len(request.prompt)
        try:
            if not admitted:
                held.enter_context(self._quotas.hold(principal, self._queue.seconds_per_request))
            return self._queue.enter(request.id, admitted, request.priority, principal, tokens)
        except QueueFull as full:
            self._metrics.rejected_requests.labels(full.reason).inc()
            raise Overloaded(str(full), full.reason, full.seconds) from None

    def _patience(self, arrived: float, limit: float | None) -> float:
        """How long to wait before the next sign of life, seconds. Raises DeadlineExceeded once the request is `limit` old."""
        if limit is None:
            return self._beat_seconds
        left = arrived + limit - time.monotonic()
        if left <= 0:
            self._metrics.rejected_requests.labels("deadline").inc()
            raise DeadlineExceeded(f"The request was not answered within {limit:g} s; try again later, or ask for less.")
        return min(self._beat_seconds, left)

    def _leave(self, request_id: str) -> None:
        """Makes room for the next request: when the worker is done with this one, however slowly its client reads."""
        self._queue.leave(request_id)
        self._metrics.record_queue(self._queue)

    def _take(self, message: FromWorker) -> None:
        self._metrics.last_progress.set(time.time())
        match message:
            case Ready():
                self.info, self.ready = message, True
                self._started.set()
                self._queue.open()
                kept = f"{message.slots} contexts of {message.slot_bytes / 1e6:.0f} MB"
                log.info("ready after %.1f s: %s on %s, %s", message.seconds, message.dtype, message.device, kept)
            case Status():
                self._metrics.record_status(message)
            case Failed():
                self._deliver(message.id, (Impossible if message.wrong else EngineError)(message.message))
            case TokenEvent():
                self._deliver(message.id, message)

    def _deliver(self, request_id: str, event: TokenEvent | EngineError) -> None:
        if isinstance(event, EngineError) or event.last:
            self._leave(request_id)
        stream = self._streams.get(request_id)  # gone where the request was cancelled meanwhile
        if stream is not None:
            stream.put_nowait(event)

    def _lost(self, why: str) -> None:
        """Ends the requests at work; those in the queue wait for the next worker."""
        self.ready = False
        self._metrics.worker_restarts.inc()
        self._metrics.record_status(Status(0, 0.0))  # its sessions are gone with it
        for request_id in self._queue.close():
            self._deliver(request_id, WorkerLost("The worker was lost while it answered; try again shortly."))

    def _failed(self, why: str) -> None:
        self.ready = False
        self.failure = why
        self._started.set()
        self._queue.fail(WorkerLost(why))
        self._on_failure(why)
