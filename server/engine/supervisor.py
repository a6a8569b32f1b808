"""Starts the worker; restarts it on crash or stall.

A server whose first worker never becomes ready fails without a restart. A worker that was ready is restarted at once; if its
successors fail soon after, the delay before each restart doubles. Promises to retry for as long as the server runs, and to
report when no worker becomes ready.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor

from outrider.server.engine import messages
from outrider.server.engine import transport as wire
from outrider.server.engine.messages import SAVE_SECONDS, FromWorker, Ready, Refused, Shutdown, ToWorker
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.settings import Settings
from outrider.server.system import is_stopped

log = logging.getLogger("outrider")
# The worker must end within this time after a Shutdown message or a signal.
STOP_SECONDS = 5.0
# A worker must have downloaded and loaded its model within this time, or it is ended.
LOAD_SECONDS = 7200.0
# The supervisor checks at this interval whether the worker has ended.
POLL_SECONDS = 0.01
# A stall is looked for at this interval.
WATCH_SECONDS = 0.5
MIN_DELAY_SECONDS = 1.0
MAX_DELAY_SECONDS = 30.0
# A worker that ran this long after Ready resets the restart delay.
STABLE_SECONDS = 60.0
# After this many failed starts in a row, the restarts count as failed. With their delays, that takes about 15 s.
MAX_FAILED_STARTS = 5


class Supervisor:
    """Owns the worker process. All callbacks run on the event loop."""

    def __init__(
        self,
        settings: Settings,
        on_message: Callable[[FromWorker], None],
        on_lost: Callable[[], None],  # the worker was lost and will be restarted
        on_unavailable: Callable[[str], None],  # restarts keep failing, and continue; one sentence; called at each failure
        on_failure: Callable[[str], None],  # the worker cannot run; one sentence
        launch: Callable[[Settings], WorkerProcess] = WorkerProcess,
    ) -> None:
        self._settings = settings
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_unavailable = on_unavailable
        self._on_failure = on_failure
        self._launch = launch
        self._thread = ThreadPoolExecutor(1, "outrider-launch")
        self._process: WorkerProcess | None = None
        self._refusal: str | None = None  # message of this worker's Refused
        self._ready_at: float | None = None  # time.monotonic() of this worker's Ready message
        self._was_ready = False  # whether a worker has been ready since the server started
        self._delay = 0.0  # seconds before the next restart
        self._failed_starts = 0  # consecutive workers that could not be started, or ended before they were ready
        self._started_at = self._last_message_at = time.monotonic()
        self._kill_reason: str | None = None  # why this worker was killed, one sentence
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, process: WorkerProcess | None = None) -> None:
        """Starts a worker, or takes over one that has been started; does not wait until it is ready."""
        self._refusal = self._ready_at = self._kill_reason = None
        self._started_at = self._last_message_at = time.monotonic()
        if process is None:
            process = await self._launched()
        self._process = process
        try:
            self._side = await wire.connect(process.socket, self._on_data, self._on_end)
        except OSError:
            process.close()
            raise

    async def _launched(self) -> WorkerProcess:
        """A new process, started in a thread. It is closed if the supervisor is stopped meanwhile."""
        starting = self._thread.submit(self._launch, self._settings)
        try:
            return await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(close_started)
            raise

    async def stop(self) -> None:
        """Ends the worker: with a Shutdown message if it is ready, and with SIGKILL if it does not end."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        process = self._running
        if process.alive and self._ready_at is not None:  # a worker that is still loading reads no messages
            self.send(Shutdown())
            saves = self._settings.sessions.folder is not None
            await asyncio.to_thread(process.wait, STOP_SECONDS + (SAVE_SECONDS if saves else 0.0))
        process.kill()
        await asyncio.to_thread(process.wait, STOP_SECONDS)
        self._side.close()

    def send(self, message: ToWorker) -> None:
        """Never blocks. A message to a worker that has ended is dropped; `on_lost` reports the loss."""
        self._side.send(messages.encode(message))

    def watch(self, busy: Callable[[], bool]) -> None:
        """Starts a watchdog that kills a worker which loads longer than LOAD_SECONDS, or is silent while it is `busy`."""
        self._spawn_task(self._watch(busy))

    async def _watch(self, busy: Callable[[], bool]) -> None:
        limits = self._settings.scheduling
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if self._ready_at is None:
                if now - self._started_at > LOAD_SECONDS:
                    self._failed_starts = MAX_FAILED_STARTS  # it has taken longer than several failed starts
                    self._kill(
                        f"The worker was not ready within {LOAD_SECONDS:g} s; if its model takes longer to download, "
                        "download it before."
                    )
            elif not busy() and not is_stopped(self._running.pid):
                self._last_message_at = now
            elif now - self._last_message_at > limits.stall_seconds:
                self._kill(f"The worker made no progress for {limits.stall_seconds:g} s.")

    def _kill(self, reason: str) -> None:
        """Ends the worker. Closing the socket reports its end even if the process is stuck in the kernel."""
        if self._running.alive and self._kill_reason is None:
            self._kill_reason = reason
            self._running.kill()
            self._side.close()

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
            self._ready_at, self._was_ready, self._failed_starts = self._last_message_at, True, 0
        self._on_message(message)

    def _on_end(self) -> None:
        if not self._stopping:
            self._spawn_task(self._replace())

    async def _replace(self) -> None:
        """Replaces the worker that has ended, or reports the failure if no worker has been ready yet."""
        await self._wait_ended()
        self._running.kill()  # it may have closed its socket without ending
        ended = f"The worker process ended unexpectedly (exit code {self._running.exit_code})."
        reason = self._refusal or self._kill_reason or ended
        if not self._was_ready:
            self._on_failure(reason)
            return
        self._on_lost()
        if self._ready_at is None:
            self._record_failed_start(reason)
        while True:
            delay = self._next_delay()
            log.error("%s Restarting it%s.", reason, f" in {delay:g} s" if delay else "")
            await asyncio.sleep(delay)
            try:
                return await self.start()
            except Exception as error:  # too many open files, no memory, no thread: a later attempt may succeed
                reason = f"The worker process could not be started ({error})."
                self._record_failed_start(reason)

    async def _wait_ended(self) -> None:
        """Waits until the process has ended, at most STOP_SECONDS. Polls, because a thread may not be available."""
        deadline = time.monotonic() + STOP_SECONDS
        while self._running.alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    def _record_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._on_unavailable(reason)

    def _next_delay(self) -> float:
        """Seconds to wait before this restart; a later one waits longer unless this worker was stable."""
        stable = self._ready_at is not None and time.monotonic() - self._ready_at > STABLE_SECONDS
        delay = 0.0 if stable else self._delay
        self._delay = min(MAX_DELAY_SECONDS, max(MIN_DELAY_SECONDS, 2 * delay))
        return delay

    def _spawn_task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("The supervision of the worker failed.", exc_info=error)
            self._on_unavailable("The supervision of the worker failed; the log has the reason. Restart the server.")


def close_started(starting: Future[WorkerProcess]) -> None:
    """Closes a process that nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
