"""A model replica: one engine with its worker, which answers the requests that the ingress routes to it.

Promises that a request whose ingress has gone is cancelled, and that events wait for their reader in bounded memory. Knows
nothing about Ray.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from outrider.server.engine.engine import MAX_UNREAD_EVENTS, Engine, EngineError
from outrider.server.engine.messages import Event, TokenEvent
from outrider.server.ray import wire
from outrider.server.settings.tree import decode_settings
from outrider.server.telemetry.logs import configure
from outrider.server.telemetry.metrics import Metrics

Item = Event | EngineError


class ModelReplica:
    """Construct it, then await `start`."""

    def __init__(self, plain: dict[str, Any]) -> None:
        """`plain` are the settings as `encode_settings` returns them: without the API keys."""
        settings = decode_settings(plain)
        configure(settings.logging)
        self.metrics = Metrics(coarse=settings.server.coalesce_ms > 0)
        self._engine = Engine(settings, self.metrics)

    async def start(self) -> None:
        """Returns once the model is loaded. Raises EngineError with one sentence if it cannot be."""
        await self._engine.start(lambda _: None)
        await self._engine.wait_started()

    async def stop(self) -> None:
        await self._engine.stop()

    def check_health(self) -> None:
        """Raises EngineError if no worker can run, so that another replica takes this one's place."""
        if self._engine.failure is not None:
            raise EngineError(self._engine.failure)

    async def describe(self) -> bytes:
        """The properties of the worker, encoded."""
        return wire.encode(await self._engine.wait_started())

    async def generate(self, call: bytes) -> AsyncGenerator[bytes, None]:
        """The answer to an encoded `Call`. Events that are ready together share one item of the stream."""
        request = wire.decode_call(call)
        events: asyncio.Queue[Item] = asyncio.Queue(MAX_UNREAD_EVENTS)
        reader = asyncio.create_task(self._read(request, events))
        try:
            finished = False
            while not finished:
                batch = [await events.get()]
                while not events.empty():
                    batch.append(events.get_nowait())
                finished = is_last(batch[-1])
                yield wire.encode_batch(batch)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def forget(self, request: bytes) -> None:
        """Drops the session of an encoded `Call` that has ended."""
        self._engine.forget(wire.decode_call(request).request)

    async def _read(self, call: wire.Call, events: asyncio.Queue[Item]) -> None:
        """Passes the engine's events on; waits while the queue is full, so that the engine pauses the request."""
        arrived = time.monotonic() - call.age_seconds
        try:
            async with aclosing(self._engine.generate(call.request, arrived, call.admitted)) as answer:
                async for event in answer:
                    if event is not None:
                        self._record(event)
                        await events.put(event)
        except EngineError as error:
            await events.put(error)

    def _record(self, event: Event) -> None:
        if isinstance(event, TokenEvent) and event.step is not None:
            self.metrics.record_step(event.step, len(event.tokens))


def is_last(item: Item) -> bool:
    """Whether the request ends with this item."""
    return isinstance(item, EngineError) or item.finish is not None
