"""Servers that share a folder of sessions."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bench.http.process import ServerProcess, start_server


class Servers:
    """Running servers. The first one always runs; the others may be restarted."""

    def __init__(self, flags: Sequence[str], count: int) -> None:
        self._flags = flags
        self._rng = random.Random(3)
        self._stacks: list[ExitStack] = []
        self._running: list[ServerProcess] = []
        self._requests: Counter[str] = Counter()  # that run, by the server's address
        self._restarting: str = ""  # address
        self.ids: list[int] = []  # of the servers' processes
        for _ in range(count):
            self._stacks.append(ExitStack())
            self._running.append(self._start(len(self._stacks) - 1))
            self.ids.append(self._running[-1].process.pid)

    @property
    def urls(self) -> list[str]:
        """The servers' addresses."""
        return [server.url for server in self._running]

    @property
    def log(self) -> list[str]:
        """The last lines of the running servers' logs."""
        return [line.rstrip() for server in self._running for line in server.log]

    def _start(self, index: int) -> ServerProcess:
        return self._stacks[index].enter_context(start_server(self._flags))

    @contextmanager
    def one(self) -> Iterator[str]:
        """The address of a server for one request."""
        url = self._rng.choice([url for url in self.urls if url != self._restarting])
        self._requests[url] += 1
        try:
            yield url
        finally:
            self._requests[url] -= 1

    async def restart(self, index: int, before_use: Callable[[str], Awaitable[None]]) -> None:
        """Stops a server once its requests have ended, and starts another in its place.

        Awaits `before_use` with its address before it gets requests.
        """
        self._restarting = self._running[index].url
        while self._requests[self._restarting]:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._stacks[index].close)
        self._running[index] = await asyncio.to_thread(self._start, index)
        self.ids[index] = self._running[index].process.pid
        self._restarting = self._running[index].url
        await before_use(self._restarting)
        self._restarting = ""

    def close(self) -> None:
        """Stops all."""
        for stack in self._stacks:
            stack.close()
