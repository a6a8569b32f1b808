"""Fake worker processes: the worker's end of the socket, controlled by the test."""

import socket
from collections.abc import Iterator
from typing import cast

from outrider.server.engine import messages
from outrider.server.engine.messages import FromWorker, Memory, Ready, ToWorker
from outrider.server.engine.transport import WorkerSide
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.settings import Settings

READY = Ready(
    context_tokens=100,
    device="cpu",
    dtype="float32",
    seconds=0.1,
    slots=2,
    max_active=2,
    slot_bytes=1000,
    invariance="off",
    weight_bits=32.0,
    kv_dtype="float32",
    memory=Memory(10, 20, 2000, None),
)


class FakeProcess:
    """Stands in for a WorkerProcess; a test plays the worker through `receive`, `send` and `die`."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._wire = WorkerSide(theirs)
        self.exit_code: int | None = None
        self.pid = 0  # of no process

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def wait(self, seconds: float) -> None:
        """Returns at once: a fake has no process to wait for."""

    def kill(self) -> None:
        if self.alive:
            self.die(-9)

    def close(self) -> None:
        self.kill()
        self.socket.close()

    def die(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._wire.close()

    def send(self, message: FromWorker) -> None:
        self._wire.send(messages.encode(message))

    def receive(self) -> list[ToWorker]:
        """The messages that have arrived."""
        return [messages.decode_to_worker(data) for data in self._wire.receive(0.01)]


class Launcher:
    """Starts fake workers and records them in order. Raises `errors` first, if a test sets them."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.errors: Iterator[Exception] = iter(())

    def __call__(self, settings: Settings) -> WorkerProcess:
        if error := next(self.errors, None):
            raise error
        self.started.append(FakeProcess())
        return cast(WorkerProcess, self.started[-1])
