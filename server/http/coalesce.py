"""Streams by a clock: what came since the last tick goes out at the next one, also where nothing came.

How many tokens of each draft were accepted shows in when packets come and how many there are, and that tells what the text
is about (arXiv 2411.01076). With a clock both are the clock's; padding (`stream_options.include_obfuscation`) hides the
sizes. How long the whole answer takes still shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def one_by_one(source: AsyncGenerator[T | None, None]) -> AsyncGenerator[list[T], None]:
    """No clock: each item as it comes; an empty list for each None."""
    async with aclosing(source):
        async for item in source:
            yield [] if item is None else [item]


async def by_clock(source: AsyncGenerator[T | None, None], seconds: float) -> AsyncGenerator[list[T], None]:
    """The first item as it comes, from then on what has come by each tick. Raises what `source` raises, at a tick."""
    held: list[T] = []
    something = asyncio.Event()

    async def pump() -> None:
        async with aclosing(source):
            async for item in source:
                if item is not None:
                    held.append(item)
                something.set()

    loop = asyncio.get_running_loop()
    pumping = asyncio.ensure_future(pump())
    pumping.add_done_callback(lambda _: something.set())
    try:
        while not held and not pumping.done():  # nothing has been said yet: signs of life pass
            something.clear()
            await something.wait()
            if not held and not pumping.done():
                yield []
        due = loop.time()
        while True:
            ended = pumping.done()
            batch, held[:] = list(held), []
            if batch or not ended:
                yield batch
            if ended:
                pumping.result()
                return
            due += seconds
            await asyncio.sleep(due - loop.time())
    finally:
        pumping.cancel()
        await asyncio.wait({pumping})
