"""A program beside the front end that answers messages in order: neither the event loop nor a stream waits for its work.

The front end asks it on the event loop, or from a thread that may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable

from outrider.server.engine.program import Program, connected
from outrider.server.engine.transport import FrontSide, WorkerSide, connect
from outrider.server.system import cpu_seconds

log = logging.getLogger("outrider")
WAIT_SECONDS = 60.0
# A program that has something to do and gets no processor time for so long is stopped or stuck.
STALL_SECONDS = 30.0
# No message takes so long, except one that loads a model.
ANSWER_SECONDS = 600.0
WATCH_SECONDS, GRACE_SECONDS = 1.0, 10.0
# A process that dies of a signal needs a moment, and one whose socket has closed ends by itself.
SIGNAL_SECONDS = 0.5


class HelperEnded(Exception):
    """The program ended before it answered."""

    def __init__(self, code: int | None = None) -> None:
        """`code` is the exit code, negative for a signal's number; None if it is not known."""
        super().__init__()
        self.code = code


class BlockingHelper(Program):
    """The program as one thread of the front end sees it. A program that is silent or too slow is killed."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self._side = WorkerSide(self.socket)

    def ask(self, message: bytes, seconds: float) -> bytes:
        """The answer to a message. Raises HelperEnded, after which no message may follow."""
        deadline = time.monotonic() + seconds
        self.socket.settimeout(seconds)
        with contextlib.suppress(OSError, EOFError):
            self._side.send(message)
            while (left := deadline - time.monotonic()) > 0:
                for answer in self._side.receive(left):
                    return answer
        self.socket.close()
        self.wait(SIGNAL_SECONDS)
        self.close()
        raise HelperEnded(self.exit_code)


class Helper:
    """The program as the front end sees it: started on first use, and again after it has ended or made no progress.

    All methods are called on the event loop, which they never block.
    """

    def __init__(self, module: str) -> None:
        """The program is `main` of this module."""
        self._module = module
        self._process: Program | None = None
        self._side: FrontSide | None = None
        self._waiting: deque[tuple[asyncio.Future[bytes], float]] = deque()  # for each message that was sent, with its limit
        self._progress = 0.0  # time.monotonic() of the last answer, or of the first message
        self._watching: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[FrontSide] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process has been started, and has not ended as far as is known."""
        return self._side is not None

    async def ask(self, message: bytes, seconds: float = ANSWER_SECONDS) -> bytes:
        """The program's answer, which takes at most `seconds`. Raises HelperEnded, and OSError if no process can be started."""
        side = self._side or await self._started()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._progress = time.monotonic()
        self._waiting.append((answer, seconds))
        side.send(message)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return await answer

    async def _watch(self) -> None:
        """Ends a process that makes no progress while a message waits; returns when none does."""
        spent, since = 0.0, time.monotonic()
        while self._waiting and self._side is not None and self._process is not None:
            await asyncio.sleep(WATCH_SECONDS)
            now, before = time.monotonic(), spent
            if (spent := cpu_seconds(self._process.pid)) != before or not spent:
                since = now
            if self._waiting and (now - since > STALL_SECONDS or now - self._progress > self._waiting[0][1]):
                log.error("the process of %s made no progress and is replaced", self._module.rpartition(".")[2])
                self._process.kill()
                self._side.close()  # reports the end even if the process is stuck in the kernel
                return

    async def _started(self) -> FrontSide:
        """The side of a new process. Its start goes on if who asked is cancelled: otherwise nobody would end the process."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> FrontSide:
        if self._process is not None:
            await asyncio.to_thread(end_process, self._process)
        self._process = await asyncio.to_thread(Program, self._module)
        self._side = await connect(self._process.socket, self._on_message, self._on_end)
        return self._side

    def _on_message(self, message: bytes) -> None:
        answer, _ = self._waiting.popleft()
        self._progress = time.monotonic()
        if not answer.done():  # it is if its client has left
            answer.set_result(message)

    def _on_end(self) -> None:
        self._side = None
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(HelperEnded())

    async def close(self) -> None:
        """Ends the process. What it has not answered is not done."""
        if self._watching is not None:
            self._watching.cancel()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._side is not None:
            self._side.close()
        if self._process is not None:
            await asyncio.to_thread(end_process, self._process)


def end_process(process: Program) -> None:
    """Kills a process and waits for its end, unless it is stuck in the kernel."""
    process.kill()
    process.wait(GRACE_SECONDS)


def answer_all(argument: str, answer: Callable[[bytes], bytes], niceness: int = 0) -> None:
    """The program's main loop: answers messages from the socket until the front end closes it."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(niceness)
    wire = WorkerSide(connected(argument))
    with contextlib.suppress(EOFError, OSError):
        while True:
            for message in wire.receive(WAIT_SECONDS):
                wire.send(answer(message))
