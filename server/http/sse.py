"""Streams on their way to a client: errors before the first byte, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

from server.openai.answers import KEEP_ALIVE, padded, sse

T = TypeVar("T")


async def named_events(events: AsyncGenerator[dict[str, Any] | None, None], padding: int) -> AsyncGenerator[bytes, None]:
    """Server-sent events that carry their type as their name, too; those with text a multiple of `padding` bytes long."""
    async with aclosing(events):
        async for event in events:
            if event is None:
                yield KEEP_ALIVE
                continue
            shown = padded(event, padding) if padding and event["type"].endswith(".delta") else event
            yield b"event: " + event["type"].encode() + b"\n" + sse(shown)


async def exhausted(events: AsyncGenerator[Any, None]) -> bool:
    """Runs to the end."""
    async with aclosing(events):
        async for _ in events:
            pass
    return True


async def started(chunks: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The stream with its first chunk already there, so that an early error still gets a status of its own."""
    first = await anext(chunks, b"")

    async def rest() -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    return rest()


async def unless_gone(http: Request, work: Awaitable[T]) -> T | None:
    """What `work` returns, or None as soon as the client is gone: then `work` is cancelled."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait({task, watch})
