"""The process that indexes corpora, as the front end sees it: started on first use, and replaced when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections import deque

from outrider.server.corpora.messages import Change, Outcome, decode_outcome, encode
from outrider.server.engine.transport import FrontSide, connect
from outrider.server.engine.worker_process import command, environment_without_settings

ENDED = Outcome(error="the process that indexes has ended")


class Indexer:
    """All methods are called on the event loop, which they never block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._side: FrontSide | None = None
        self._waiting: deque[asyncio.Future[Outcome]] = deque()  # one for each change that was sent
        self._starting = asyncio.Lock()

    async def apply(self, change: Change) -> Outcome:
        """The outcome of a change. Raises OSError if no process can be started."""
        message = await asyncio.to_thread(encode, change)
        async with self._starting:
            side = self._side or await self._start()
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        side.send(message)
        return await answer

    async def _start(self) -> FrontSide:
        end, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.to_thread(launch, theirs)
        self._side = await connect(end, self._on_message, self._on_end)
        return self._side

    def _on_message(self, message: bytes) -> None:
        self._answer(decode_outcome(message))

    def _on_end(self) -> None:
        self._side = None
        while self._waiting:
            self._answer(ENDED)

    def _answer(self, outcome: Outcome) -> None:
        answer = self._waiting.popleft()
        if not answer.done():  # it is if its client has left
            answer.set_result(outcome)

    async def close(self) -> None:
        """Ends the process. Changes that are in progress do not happen."""
        if self._side is not None:
            self._side.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._process.wait)


def launch(end: socket.socket) -> subprocess.Popen[bytes]:
    """The process, with its end of the socket. Raises OSError."""
    program = command("outrider.server.corpora.indexer", str(end.fileno()))
    return subprocess.Popen(program, stdin=subprocess.DEVNULL, pass_fds=[end.fileno()], env=environment_without_settings())
