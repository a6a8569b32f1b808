"""Starts the worker; restarts it on crash or stall.

A server whose first worker never becomes ready fails without a restart. A worker that was ready is restarted at once; if its
successors fail soon after, the delay before each restart doubles.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from server.engine import messages
from server.engine import transport as wire
from server.engine.messages import FromWorker, Ready, Refused, Shutdown, ToWorker
from server.engine.worker_process import WorkerProcess
from server.settings import Settings

log = logging.getLogger("outrider")
STOP_SECONDS = 5.0  # for the worker to end after a Shutdown message
WATCH_SECONDS = 0.5  # between two checks for a stall
MIN_DELAY_SECONDS = 1.0
MAX_DELAY_SECONDS = 30.0
STABLE_SECONDS = 60.0  # a worker that ran this long after Ready resets the restart delay


class Supervisor:
    """Owns the worker process. All callbacks run on the event loop."""

    def __init__(
        self,
        settings: Settings,
        on_message: Callable[[FromWorker], None],
        on_lost: Callable[[], None],  # the worker was lost and will be restarted
        on_failure: Callable[[str], None],  # the worker cannot run; one sentence
        launch: Callable[[Settings], WorkerProcess] = WorkerProcess,
    ) -> None:
        self._settings = settings
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_failure = on_failure
        self._launch = launch
        self._process: WorkerProcess | None = None
        self._refusal: str | None = None  # the message of this worker's Refused
        self._ready_at: float | None = None  # time.monotonic() of this worker's Ready message
        self._was_ready = False  # a worker has been ready since the server started
        self._delay = 0.0  # seconds before the next restart
        self._last_message_at = time.monotonic()
        self._stalled = False
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, process: WorkerProcess | None = None) -> None:
        """Starts a worker, or takes over one that has been started; does not wait until it is ready."""
        self._refusal, self._ready_at, self._stalled, self._last_message_at = None, None, False, time.monotonic()
        if process is None:
            process = await asyncio.to_thread(self._launch, self._settings)
        self._process = process
        self._side = await wire.connect(process.socket, self._on_data, self._on_end)

    async def stop(self) -> None:
        """Ends the worker: with a Shutdown message if it is ready, and with SIGKILL if it does not end."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        process = self._running
        if process.alive and self._ready_at is not None:  # a worker that is still loading reads no messages
            self.send(Shutdown())
            await asyncio.to_thread(process.wait, STOP_SECONDS)
        process.kill()
        await asyncio.to_thread(process.wait, STOP_SECONDS)
        self._side.close()

    def send(self, message: ToWorker) -> None:
        """Never blocks. A message to a worker that has ended is dropped; `on_lost` reports the loss."""
        self._side.send(messages.encode(message))

    def watch(self, busy: Callable[[], bool]) -> None:
        """From now on, kills a worker that is `busy` but silent for `scheduling.stall_seconds`."""
        self._spawn_task(self._watch(busy))

    async def _watch(self, busy: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if not busy():
                self._last_message_at = time.monotonic()
            elif time.monotonic() - self._last_message_at > self._settings.scheduling.stall_seconds:
                self._stalled = True
                self._running.kill()
                self._last_message_at = time.monotonic()

    @property
    def _running(self) -> WorkerProcess:
        assert self._process is not None, "start() has not been called"
        return self._process

    def _on_data(self, data: bytes) -> None:
        self._last_message_at = time.monotonic()
        message = messages.decode_from_worker(data)
        if isinstance(message, Refused):
            self._refusal = message.message
            return
        if isinstance(message, Ready):
            self._ready_at, self._was_ready = self._last_message_at, True
        self._on_message(message)

    def _on_end(self) -> None:
        if not self._stopping:
            self._spawn_task(self._restart())

    async def _restart(self) -> None:
        """Restarts the worker after a delay, or reports the failure if no worker has been ready yet."""
        await asyncio.to_thread(self._running.wait, STOP_SECONDS)
        if self._stalled:
            reason = f"The worker made no progress for {self._settings.scheduling.stall_seconds:g} s."
        else:
            reason = f"The worker process ended unexpectedly (exit code {self._running.exit_code})."
        if not self._was_ready:
            self._on_failure(self._refusal or reason)
            return
        delay = self._next_delay()
        log.error("%s Restarting it%s.", self._refusal or reason, f" in {delay:g} s" if delay else "")
        self._on_lost()
        await asyncio.sleep(delay)
        await self.start()

    def _next_delay(self) -> float:
        """Seconds to wait before this restart; a later one waits longer unless this worker was stable."""
        stable = self._ready_at is not None and time.monotonic() - self._ready_at > STABLE_SECONDS
        delay = 0.0 if stable else self._delay
        self._delay = min(MAX_DELAY_SECONDS, max(MIN_DELAY_SECONDS, 2 * delay))
        return delay

    def _spawn_task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
