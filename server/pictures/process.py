"""The process that prepares pictures, as a thread of the front end sees it. Knows nothing about the messages' content.

Promises that an answer is read off the event loop, and that a process which is silent or too slow is killed.
"""

from __future__ import annotations

import contextlib
import signal
import time

from outrider.server.engine.program import start
from outrider.server.engine.transport import WorkerSide

# The process limits its processor time itself; this is for one that waits or was stopped.
ANSWER_SECONDS = 120.0
# From a slow disk or the hub.
LOAD_SECONDS = 600.0
# A process that dies of a signal needs a moment, and one whose socket has closed ends by itself.
GRACE_SECONDS = 0.5


class ProcessEnded(Exception):
    """The process ended before it answered."""

    def __init__(self, was_slow: bool = False) -> None:
        super().__init__()
        self.was_slow = was_slow  # whether it ended because of its limit of processor time


class PictureProcess:
    """A running process. One thread at a time may ask it."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._process, self._end = start("outrider.server.pictures.preparer")
        self._side = WorkerSide(self._end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: bytes, seconds: float = ANSWER_SECONDS) -> bytes:
        """The answer to a message. Raises ProcessEnded, after which no message may follow."""
        deadline = time.monotonic() + seconds
        self._end.settimeout(seconds)
        with contextlib.suppress(OSError, EOFError):
            self._side.send(message)
            while (left := deadline - time.monotonic()) > 0:
                for answer in self._side.receive(left):
                    return answer
        raise ProcessEnded(self.close() == -getattr(signal, "SIGPROF", 0))

    def close(self) -> int:
        """Kills the process if it still runs, and returns its exit code, negative for a signal."""
        with contextlib.suppress(OSError):
            self._side.close()
        with contextlib.suppress(Exception):
            self._process.wait(GRACE_SECONDS)
        self._process.kill()
        return self._process.wait()
