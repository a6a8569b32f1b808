"""A program beside the front end that answers messages in order: neither the event loop nor a stream waits for its work.

The front end asks it on the event loop, or from a thread that may wait.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from outrider.server.engine.program import Program, connected
from outrider.server.engine.transport import WorkerSide
from outrider.server.system import cpu_seconds

WAIT_SECONDS = 60.0
# A program that has something to do and gets no processor time for so long is stopped or stuck.
STALL_SECONDS = 30.0
WATCH_SECONDS = 1.0
# No message takes so long, except one that loads a model.
ANSWER_SECONDS = 600.0
# A process that dies of a signal needs a moment, and one whose socket has closed ends by itself.
SIGNAL_SECONDS = 0.5


class HelperEnded(Exception):
    """The program ended before it answered."""

    def __init__(self, code: int | None = None) -> None:
        """`code` is the exit code, negative for a signal's number; None if it is not known."""
        super().__init__()
        self.code = code


class BlockingHelper(Program):
    """The program as one thread of the front end sees it. A program that is silent, stopped or too slow is killed."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self._side = WorkerSide(self.socket)

    def ask(self, message: bytes, seconds: float) -> bytes:
        """The answer to a message. Raises HelperEnded, after which no message may follow."""
        deadline, spent, since = time.monotonic() + seconds, 0.0, time.monotonic()
        self.socket.settimeout(min(seconds, STALL_SECONDS))
        with contextlib.suppress(OSError, EOFError):
            self._side.send(message)
            while (now := time.monotonic()) < min(deadline, since + STALL_SECONDS):
                for answer in self._side.receive(min(deadline - now, WATCH_SECONDS)):
                    return answer
                before, spent = spent, cpu_seconds(self.pid)
                if spent != before or not spent:
                    since = now
        self.socket.close()
        self.wait(SIGNAL_SECONDS)
        self.close()
        raise HelperEnded(self.exit_code)


class Helper:
    """The program as the event loop sees it, which it never blocks: started on first use, and again after it has ended."""

    def __init__(self, module: str) -> None:
        """The program is `main` of this module."""
        self._module = module
        self._process: BlockingHelper | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the process has been started, and has not ended."""
        return self._process is not None and self._process.alive

    async def ask(self, message: bytes, seconds: float = ANSWER_SECONDS) -> bytes:
        """The program's answer, which takes at most `seconds`. Raises HelperEnded, and OSError if no process can be started."""
        asked = asyncio.ensure_future(self._ask(message, seconds))
        asked.add_done_callback(_retrieve)  # nobody else does if who has asked leaves
        return await asyncio.shield(asked)  # the answer to who has left must not be the next one's

    async def _ask(self, message: bytes, seconds: float) -> bytes:
        async with self._turn:
            if self._closed:
                raise HelperEnded
            if self._process is None or not self._process.alive:
                self._process = await asyncio.to_thread(BlockingHelper, self._module)
            return await asyncio.to_thread(self._process.ask, message, seconds)

    async def close(self) -> None:
        """Ends the process, and what it is asked."""
        self._closed = True
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        async with self._turn:  # one that was starting
            if self._process is not None:
                await asyncio.to_thread(self._process.close)


def _retrieve(asked: asyncio.Future[bytes]) -> None:
    if not asked.cancelled():
        asked.exception()


def answer_all(argument: str, answer: Callable[[bytes], bytes], niceness: int = 0) -> None:
    """The program's main loop: answers messages from the socket until the front end closes it."""
    os.nice(niceness)
    wire = WorkerSide(connected(argument))
    with contextlib.suppress(EOFError, OSError):
        while True:
            for message in wire.receive(WAIT_SECONDS):
                wire.send(answer(message))
