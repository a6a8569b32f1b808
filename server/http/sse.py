"""Server-sent events: framing, padding, keep-alives, coalescing, and clients that disconnect.

Knows nothing about the events' content.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import Request, Response

from outrider.server.http.errors import CLIENT_CLOSED_REQUEST

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
PADDED_BYTES = 256
# A coalesced event holds the text of a whole tick, so it is padded to more bytes.
COALESCED_PADDED_BYTES = 2048
# For a client that does not read, at most this many events are buffered.
MAX_PENDING_ITEMS = 64
# The second header turns off buffering in nginx.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    data: dict[str, Any] | Literal["[DONE]"]
    name: str | None = None  # the `event:` field
    padded: bool = False  # contains generated text, so its size is hidden if the client requests it

    def encode(self, multiple_bytes: int = 0) -> bytes:
        """The event's bytes. If it is `padded`, its JSON is extended to a multiple of `multiple_bytes`; 0 = no padding."""
        name = b"" if self.name is None else b"event: " + self.name.encode() + b"\n"
        if isinstance(self.data, str):
            return name + b"data: " + self.data.encode() + b"\n\n"
        data = pad(self.data, multiple_bytes) if self.padded and multiple_bytes else self.data
        return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


# OpenAI's chat and completion streams end with this event.
DONE = ServerSentEvent("[DONE]")


def pad(data: dict[str, Any], multiple_bytes: int) -> dict[str, Any]:
    """Adds random text as `obfuscation`, so that the JSON's size is a multiple of `multiple_bytes`."""
    size = len(msgspec.json.encode(data)) + len(',"obfuscation":""')
    return data | {"obfuscation": secrets.token_hex(multiple_bytes)[: -size % multiple_bytes]}


async def singly(source: AsyncGenerator[T | None, None]) -> AsyncGenerator[list[T], None]:
    """Yields each item as its own batch, and an empty batch for each None."""
    async with aclosing(source):
        async for item in source:
            yield [] if item is None else [item]


async def coalesce(source: AsyncGenerator[T | None, None], tick_seconds: float) -> AsyncGenerator[list[T], None]:
    """Batches the items at fixed intervals, so that the times of packets do not depend on the times of items.

    The first item is passed on at once; from then on there is one batch per tick, empty or not. Before the first item,
    each None becomes an empty batch. An error of `source` is raised at a tick, after the items before it. While a batch is not
    taken, `source` is read up to MAX_PENDING_ITEMS items ahead.

    The number and the times of packets reveal how many nodes were accepted at each step, which reveals the
    text's topic (arXiv 2411.01076). Coalescing hides both, padding hides the sizes; the total time still shows.
    """
    pending: list[T] = []
    changed, reading = asyncio.Event(), asyncio.Event()
    reading.set()

    async def pump() -> None:
        async with aclosing(source):
            async for item in source:
                if item is not None:
                    pending.append(item)
                changed.set()
                if len(pending) >= MAX_PENDING_ITEMS:
                    await reading.wait()

    loop = asyncio.get_running_loop()
    pumping = asyncio.ensure_future(pump())
    pumping.add_done_callback(lambda _: changed.set())
    try:
        while not pending and not pumping.done():
            changed.clear()
            await changed.wait()
            if not pending and not pumping.done():
                yield []
        due = loop.time()
        while True:
            finished = pumping.done()
            batch, pending[:] = list(pending), []
            if batch or not finished:
                reading.clear()
                yield batch
                reading.set()
            if finished:
                pumping.result()
                return
            due += tick_seconds
            await asyncio.sleep(due - loop.time())
    finally:
        pumping.cancel()
        await asyncio.wait({pumping})


async def start(chunks: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Waits for the first chunk, and returns the whole stream, that chunk included. Raises what precedes the first chunk."""
    first = await anext(chunks, b"")

    async def stream() -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    return stream()


async def cancel_on_disconnect(http: Request, work: Awaitable[Response]) -> Response:
    """The response that `work` returns. If the client disconnects first, cancels `work`."""
    task = asyncio.ensure_future(work)

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.wait({task, watcher})
