"""The engine: queues requests for the worker and routes each event to its request.

Promises that the event loop never blocks on the worker, that the queue is bounded, that a request whose client disconnects is
cancelled, that one whose client does not read takes no turns, that losing the worker fails only the requests that have started,
and that every request ends.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from outrider.server.engine import messages
from outrider.server.engine.fair_queue import Queue, QueueFull
from outrider.server.engine.supervisor import Supervisor
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.settings import Scheduling, Settings
from outrider.server.telemetry.metrics import Metrics

log = logging.getLogger("outrider")
# A request with this many unread events is held: it keeps its session, but gets no turn.
MAX_UNREAD_EVENTS = 64
# A stream without events for this long gets a keep-alive: less than the idle timeouts of proxies.
KEEP_ALIVE_SECONDS = 15.0
# A held request whose events stay unread for this long is ended.
HELD_SECONDS = 60.0


class EngineError(RuntimeError):
    """A request failed; the message may be shown to the client."""


class Overloaded(EngineError):
    """The queue is full. Retry after `seconds`."""

    def __init__(self, message: str, reason: str, seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.seconds = seconds


class InvalidRequest(EngineError):
    """The request is invalid."""


class Unavailable(EngineError):
    """The server cannot answer now; `code` is the error code."""

    code = "unavailable"


class WorkerLost(Unavailable):
    """The worker process ended."""

    code = "worker_unavailable"


class DeadlineExceeded(Unavailable):
    """The request exceeded a time limit of the settings."""

    code = "deadline_exceeded"


class Unread(Unavailable):
    """The client does not read the answer."""

    code = "unread"


class ShuttingDown(Unavailable):
    """The server is shutting down."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down; try again shortly.")


def seconds_left(limits: Scheduling, arrived: float, waiting: bool) -> float:
    """Seconds until a request reaches a time limit, infinite without one. Raises DeadlineExceeded once it has reached it."""
    bounds = [limits.request_seconds, limits.queue_seconds if waiting else None]
    limit = min((bound for bound in bounds if bound is not None), default=math.inf)
    if (left := arrived + limit - time.monotonic()) <= 0:
        raise DeadlineExceeded(f"The request did not finish within {limit:g} s; try again later or request fewer tokens.")
    return left


@dataclass(eq=False)
class Delivery:
    """The events of a request on their way to its client."""

    request: messages.Request
    arrived: float  # time.monotonic()
    events: asyncio.Queue[messages.Event | EngineError] = field(default_factory=asyncio.Queue)
    sent: bool = False  # the worker has the request
    held: asyncio.TimerHandle | None = None  # ends the request, which gets no turn until its events have been read
    ended: bool = False  # ended because it was held for too long, or with too many others


class Engine:
    """Owns the queue and the supervisor. Call `start`, then `generate` for each request, then `stop`."""

    shares_files = True

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._finds_sessions = settings.finds_sessions_by_text
        self._metrics = metrics
        self._adapters = settings.model.adapters
        self._limits = limits = settings.scheduling
        self._queue = Queue(limits.most_active, limits.max_waiting, on_run=self._run, on_pause=self._pause)
        self._deliveries: dict[str, Delivery] = {}
        self._supervisor = Supervisor(settings, self._on_message, self._on_lost, self._on_unavailable, self._on_failed)
        self._spawned: WorkerProcess | None = None
        self._started = asyncio.Event()  # set when the first worker is ready or has failed
        self.info: messages.Ready | None = None  # what the latest ready worker reported
        self.ready = False  # whether a worker serves requests
        self._draining = False  # whether new requests are refused
        self.failure: str | None = None  # why no worker runs and requests are refused, one sentence

    @property
    def state(self) -> str:
        """ready, loading (the first worker), restarting (a later worker), draining or failed."""
        if self.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "ready" if self.ready else "restarting" if self.info else "loading"

    def adopt(self, process: WorkerProcess) -> None:
        """Makes `start` use a worker that is already loading, instead of starting one."""
        self._spawned = process

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """Starts the worker and returns; `ready` becomes true when it has loaded. Calls `on_failure` if it cannot run."""
        self._on_failure = on_failure
        await self._supervisor.start(self._spawned)
        self._supervisor.watch(lambda: self.ready and self._queue.active > 0)

    async def stop(self) -> None:
        await self._supervisor.stop()

    def drain(self) -> None:
        """Refuses new requests from now on; accepted ones continue."""
        self._draining = True

    def abort(self) -> None:
        """Fails all requests with ShuttingDown."""
        self._fail_all(ShuttingDown())

    @property
    def seconds_per_request(self) -> float:
        return self._queue.seconds_per_request

    async def wait_started(self) -> messages.Ready:
        """Waits for the first worker and returns its Ready message. Raises WorkerLost if no worker can run."""
        await self._started.wait()
        if self.failure is not None:
            raise WorkerLost(self.failure)
        assert self.info is not None
        return self.info

    async def generate(
        self, request: messages.Request, arrived: float | None = None, admitted: bool = False
    ) -> AsyncGenerator[messages.Event | None, None]:
        """Yields the request's events, and None after each keep-alive interval without an event. Raises EngineError.

        Closing the iterator cancels the request. `arrived` (time.monotonic(), default: now) is where its time limit begins.
        With `admitted`, the request is exempt from the queue's bounds.
        """
        delivery = Delivery(request, time.monotonic() if arrived is None else arrived)
        self._enter(delivery, admitted)
        finished = False
        try:
            while not finished:
                try:
                    async with asyncio.timeout(self._timeout(delivery, admitted)):
                        event = await delivery.events.get()
                except TimeoutError:
                    yield None
                    continue
                if delivery.held is not None and delivery.events.empty():
                    delivery.held.cancel()
                    delivery.held = None
                    self._queue.resume(request.id)
                finished = isinstance(event, EngineError) or event.finish is not None
                if isinstance(event, EngineError):
                    raise event
                yield event
        finally:
            del self._deliveries[request.id]
            self._leave(request.id)
            if delivery.held is not None:
                delivery.held.cancel()
            if delivery.sent and not (finished or delivery.ended):
                self._supervisor.send(messages.Cancel(request.id))

    def forget(self, request: messages.Request) -> None:
        if request.session is not None:
            self._supervisor.send(messages.Forget(request.principal, request.session, request.adapter))

    def _enter(self, delivery: Delivery, admitted: bool) -> None:
        """Queues the request. Raises EngineError."""
        if self.failure is not None:
            raise WorkerLost(self.failure)
        if self._draining and not admitted:
            self._metrics.rejected_requests.labels("draining").inc()
            raise ShuttingDown
        request = delivery.request
        self._deliveries[request.id] = delivery
        try:
            session = None if self._finds_sessions else request.session  # whose requests would wait for each other
            self._queue.enter(request.id, admitted, request.priority, request.principal, len(request.prompt), session)
        except QueueFull as full:
            del self._deliveries[request.id]
            self._metrics.rejected_requests.labels(full.reason).inc()
            raise Overloaded(str(full), full.reason, full.seconds) from None
        self._metrics.record_queue(self._queue)

    def _run(self, request_id: str) -> None:
        self._metrics.record_queue(self._queue)
        delivery = self._deliveries[request_id]
        self._supervisor.send(messages.Resume(request_id) if delivery.sent else delivery.request)
        if not delivery.sent:
            delivery.sent = True
            self._metrics.queue.observe(time.monotonic() - delivery.arrived)

    def _pause(self, request_id: str) -> None:
        """The request's turn ends before the request does."""
        self._metrics.record_queue(self._queue)
        self._supervisor.send(messages.Pause(request_id))

    def _timeout(self, delivery: Delivery, admitted: bool) -> float:
        """Seconds to wait for an event before a keep-alive. Raises DeadlineExceeded once a time limit is exceeded."""
        try:
            left = seconds_left(self._limits, delivery.arrived, waiting=not (delivery.sent or admitted))
        except DeadlineExceeded:
            self._metrics.rejected_requests.labels("deadline").inc()
            raise
        return min(KEEP_ALIVE_SECONDS, left)

    def _leave(self, request_id: str) -> None:
        """Frees the request's place as soon as the worker has finished it, even if its client has not read the answer yet."""
        self._queue.leave(request_id)
        self._metrics.record_queue(self._queue)

    def _on_message(self, message: messages.FromWorker) -> None:
        self._metrics.last_progress.set(time.time())
        match message:
            case messages.Ready():
                self.info, self.ready, self.failure = message, True, None
                self._metrics.worker_ready.set(1)
                self._metrics.record_model(message, self._adapters)
                self._started.set()
                self._queue.open(self._limits.max_active or message.max_active, message.slots)
                slots = f"{message.slots} KV cache slots of {message.slot_bytes / 1e6:.0f} MB in {message.kv_dtype}"
                where = f"{message.dtype} on {message.device}, {message.weight_bits:g} bits per weight, {slots}"
                rows = message.invariance
                log.info("ready after %.1f s: %s; %s; invariant rows: %s", message.seconds, where, message.memory, rows)
            case messages.Status():
                self._metrics.record_status(message)
                self.info = self.info and msgspec.structs.replace(self.info, alone=message.alone)
                if message.max_active is not None and self._limits.max_active is None:
                    self._queue.allow(message.max_active)
            case messages.Failed():
                self._deliver(message.id, (InvalidRequest if message.client_error else EngineError)(message.message))
            case messages.Accepted() | messages.TokenEvent():
                if isinstance(message, messages.TokenEvent) and message.reuse is not None:  # the first one
                    self._queue.answer(message.id)
                self._deliver(message.id, message)

    def _deliver(self, request_id: str, event: messages.Event | EngineError) -> None:
        if isinstance(event, EngineError) or event.finish is not None:
            self._leave(request_id)
        delivery = self._deliveries.get(request_id)  # None if the request was cancelled
        if delivery is None:
            return
        delivery.events.put_nowait(event)
        if delivery.events.qsize() >= MAX_UNREAD_EVENTS and delivery.held is None and not delivery.ended:
            self._hold(delivery)

    def _hold(self, delivery: Delivery) -> None:
        """Gives a request no turn until its events are read. Ends it in time, or if its principal has too many."""
        request = delivery.request
        delivery.held = asyncio.get_running_loop().call_later(HELD_SECONDS, self._end_unread, request.id)
        self._queue.hold(request.id)
        if surplus := self._queue.surplus(request.principal):
            self._end_unread(surplus)

    def _end_unread(self, request_id: str) -> None:
        """Ends a request whose events are not read, and gives its session back."""
        delivery = self._deliveries.get(request_id)
        if delivery is None or delivery.ended:
            return
        delivery.ended = True
        self._metrics.rejected_requests.labels("unread").inc()
        self._leave(request_id)
        if delivery.sent:
            self._supervisor.send(messages.Cancel(request_id))
        message = "The answer was not read in time, or too many answers were not read; read streams as they arrive."
        delivery.events.put_nowait(Unread(message))

    def _on_lost(self) -> None:
        """Fails the requests that have started; the others wait for the next worker."""
        self.ready = False
        self._metrics.worker_ready.set(0)
        self._metrics.worker_restarts.inc()
        self._metrics.record_status(messages.Status(0, 0.0))  # the worker's sessions are lost
        for request_id in self._queue.close():
            self._deliver(request_id, WorkerLost("The worker was lost during the request; try again shortly."))

    def _on_unavailable(self, reason: str) -> None:
        """Fails all requests, and new ones until a worker is ready."""
        self.failure = reason
        self._fail_all(WorkerLost(f"{reason} Try again later."))

    def _on_failed(self, reason: str) -> None:
        """No worker will run: ends the server."""
        self.ready = False
        self._on_unavailable(reason)
        self._started.set()
        self._on_failure(reason)

    def _fail_all(self, error: EngineError) -> None:
        self._queue.close()
        for request_id in list(self._deliveries):
            self._deliver(request_id, error)
