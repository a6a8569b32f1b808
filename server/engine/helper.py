"""A program beside the front end that answers messages in order: neither the event loop nor a stream waits for its work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections import deque
from collections.abc import Callable

from outrider.server.engine.program import connected, start
from outrider.server.engine.transport import FrontSide, WorkerSide, connect

WAIT_SECONDS = 60.0


class HelperEnded(Exception):
    """The program ended before it answered."""


class Helper:
    """The program as the front end sees it: started on first use, and again after it has ended.

    All methods are called on the event loop, which they never block.
    """

    def __init__(self, module: str) -> None:
        """The program is `main` of this module."""
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._side: FrontSide | None = None
        self._waiting: deque[asyncio.Future[bytes]] = deque()  # one for each message that was sent
        self._starting = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process has been started, and has not ended as far as is known."""
        return self._side is not None

    async def ask(self, message: bytes) -> bytes:
        """The program's answer. Raises HelperEnded, and OSError if no process can be started."""
        async with self._starting:
            side = self._side or await self._start()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        side.send(message)
        return await answer

    async def _start(self) -> FrontSide:
        self._process, end = await asyncio.to_thread(start, self._module)
        self._side = await connect(end, self._on_message, self._on_end)
        return self._side

    def _on_message(self, message: bytes) -> None:
        answer = self._waiting.popleft()
        if not answer.done():  # it is if its client has left
            answer.set_result(message)

    def _on_end(self) -> None:
        self._side = None
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(HelperEnded())

    async def close(self) -> None:
        """Ends the process. What it has not answered is not done."""
        if self._side is not None:
            self._side.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._process.wait)


def answer_all(argument: str, answer: Callable[[bytes], bytes], niceness: int) -> None:
    """The program's main loop: answers messages from the socket until the front end closes it."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(niceness)
    wire = WorkerSide(connected(argument))
    with contextlib.suppress(EOFError, OSError):
        while True:
            for message in wire.receive(WAIT_SECONDS):
                wire.send(answer(message))
