"""The ingress's engine: sends each request to the replica that its affinity selects, and reads the answer.

Promises that a request whose replica is lost before its first token is served by another one, that one that has begun ends with
an error, and that every request ends. Knows Ray only through `Replicas`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Protocol

from outrider.server.engine.engine import KEEP_ALIVE_SECONDS, EngineError, Overloaded, ShuttingDown, WorkerLost, seconds_left
from outrider.server.engine.fair_queue import EMA_WEIGHT
from outrider.server.engine.messages import Event, Ready, Request, TokenEvent
from outrider.server.ray import wire
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics

log = logging.getLogger("outrider")
# A request fails after it has lost this many replicas, because its prompt may be what ends them.
MAX_LOSSES = 3
# A first replica is tried at this interval.
RETRY_SECONDS = 1.0


class ReplicaLost(Exception):
    """The replica has ended, or cannot be reached."""


class ReplicasFull(Exception):
    """No replica has room for the request, and the queue is full."""


class Replicas(Protocol):
    """The model replicas of a cluster."""

    async def describe(self) -> bytes:
        """The encoded Ready message of any replica; waits for one. Raises ReplicaLost."""

    def generate(self, affinity: str, call: bytes) -> AsyncGenerator[bytes, None]:
        """The batches of an answer. Closing the iterator cancels the request. Raises ReplicaLost and ReplicasFull."""

    def forget(self, affinity: str, call: bytes) -> None:
        """Drops the session of a call that has ended."""


class RemoteEngine:
    """An engine whose workers are the replicas of a cluster. See `EngineLike`."""

    shares_files = False
    failure = None  # replicas that fail are replaced; requests wait for them

    def __init__(self, settings: Settings, metrics: Metrics, replicas: Replicas) -> None:
        self._limits = settings.scheduling
        self._metrics = metrics
        self._replicas = replicas
        self._started = asyncio.Event()
        self._search: asyncio.Task[None] | None = None
        self._draining = False
        self.info: Ready | None = None  # what the first replica that answered reported
        self.seconds_per_request = 1.0  # seconds of a request (EMA)

    @property
    def ready(self) -> bool:
        """Whether a replica has been ready."""
        return self.info is not None and not self._draining

    @property
    def state(self) -> str:
        """ready, loading or draining."""
        return "draining" if self._draining else "ready" if self.info else "loading"

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """Begins to wait for a replica."""
        self._search = asyncio.create_task(self._find_replica())

    async def stop(self) -> None:
        """Refuses further requests."""
        self._draining = True
        if self._search is not None:
            self._search.cancel()

    async def wait_started(self) -> Ready:
        """Waits until a replica has been ready, and returns its properties."""
        await self._started.wait()
        assert self.info is not None
        return self.info

    async def _find_replica(self) -> None:
        while self.info is None:
            try:
                self.info = wire.decode_ready(await self._replicas.describe())
            except ReplicaLost:
                await asyncio.sleep(RETRY_SECONDS)
        self._started.set()

    async def generate(
        self, request: Request, arrived: float | None = None, admitted: bool = False
    ) -> AsyncGenerator[Event | None, None]:
        """See `EngineLike`. A request that is sent again keeps its place: it is exempt from the queue's bounds."""
        if self._draining and not admitted:
            self._metrics.rejected_requests.labels("draining").inc()
            raise ShuttingDown
        started = time.monotonic() if arrived is None else arrived
        losses = 0
        while True:
            begun = False
            try:
                async with aclosing(self._attempt(request, started, admitted or losses > 0)) as events:
                    async for event in events:
                        begun = begun or isinstance(event, TokenEvent)
                        yield event
                break
            except ReplicaLost:
                losses += 1
                if begun or losses >= MAX_LOSSES:
                    raise WorkerLost("The replica was lost during the request; try again shortly.") from None
                log.warning("the replica of request %s was lost before its first token; it goes to another one", request.id)
        seconds = time.monotonic() - started
        self.seconds_per_request = EMA_WEIGHT * self.seconds_per_request + (1 - EMA_WEIGHT) * seconds

    def forget(self, request: Request) -> None:
        """Drops the session of a request that has ended, on the replica that its affinity selects."""
        if request.session is not None:
            self._replicas.forget(request.affinity, wire.encode(wire.Call(request, 0.0, True)))

    async def _attempt(self, request: Request, arrived: float, admitted: bool) -> AsyncGenerator[Event | None, None]:
        """The events from one replica. Raises EngineError and ReplicaLost."""
        call = wire.encode(wire.Call(request, time.monotonic() - arrived, admitted))
        waiting = True
        try:
            async with aclosing(self._replicas.generate(request.affinity, call)) as batches:
                while True:
                    batch = asyncio.ensure_future(anext(batches, None))
                    try:
                        while not batch.done():
                            left = seconds_left(self._limits, arrived, waiting and not admitted)
                            await asyncio.wait({batch}, timeout=min(KEEP_ALIVE_SECONDS, left))
                            if not batch.done():
                                yield None
                    finally:
                        await cancelled(batch)
                    data = batch.result()
                    if data is None:
                        raise ReplicaLost
                    waiting = False
                    for item in wire.decode_batch(data):
                        if isinstance(item, EngineError):
                            raise item
                        yield item
                        if item.finish is not None:
                            return
        except ReplicasFull:
            self._metrics.rejected_requests.labels("queue_full").inc()
            message = "All replicas are busy and the queue is full; try again shortly."
            raise Overloaded(message, "queue_full", self.seconds_per_request) from None


async def cancelled(task: asyncio.Future[bytes | None]) -> None:
    """Ends a task that may still run, and waits for its end; its generator cannot be closed before."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
