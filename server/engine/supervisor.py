"""The worker process's keeper: starts it, hears it, and replaces it when it dies or stands still.

A worker that never got ready is not tried again: what it says is for the owner to mend. One that had been ready is replaced at
once; when its successors die soon, too, each waits longer.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Callable

from server.engine import messages
from server.engine import transport as wire
from server.engine.messages import FromWorker, Ready, Refused, Shutdown, ToWorker
from server.settings import Settings
from server.worker import loop as worker

log = logging.getLogger("outrider")
STOP_SECONDS = 5.0
WATCH_SECONDS = 0.5
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
SOUND_SECONDS = 60.0  # a worker that lived so long after it got ready did not fail at once


class Supervisor:
    """Owns the worker process. Calls back from the event loop."""

    def __init__(
        self,
        settings: Settings,
        on_message: Callable[[FromWorker], None],
        on_lost: Callable[[str], None],  # a worker is gone and another one is on its way
        on_failure: Callable[[str], None],  # there will be no worker
    ) -> None:
        self._settings = settings
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_failure = on_failure
        self._refused: str | None = None
        self._ready_at: float | None = None  # time.monotonic() of this worker's Ready
        self._was_ready = False  # some worker was
        self._pause = 0.0
        self._heard = time.monotonic()
        self._stalled = False
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Spawns a worker; returns at once."""
        self._ready_at, self._stalled, self._heard = None, False, time.monotonic()
        self._side, theirs = await wire.connect(self._take, self._ended)
        spawn = multiprocessing.get_context("spawn")
        arguments = (self._settings, theirs, time.monotonic())
        self._process = spawn.Process(target=worker.main, args=arguments, name="outrider-worker", daemon=True)
        await asyncio.to_thread(self._process.start)
        theirs.close()

    async def stop(self) -> None:
        """Ends the worker, asking it first."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        if self._process.is_alive() and self._ready_at is not None:  # one that is loading does not listen
            self.send(Shutdown())
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._side.close()

    def send(self, message: ToWorker) -> None:
        """Never waits; a message to a worker that is gone is dropped, its loss is noticed elsewhere."""
        self._side.send(messages.encode(message))

    def watch(self, busy: Callable[[], bool]) -> None:
        """From now on, a worker that is `busy` and silent for the set time is replaced."""

        async def look() -> None:
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                if not busy():
                    self._heard = time.monotonic()
                elif time.monotonic() - self._heard > self._settings.scheduling.stall_seconds:
                    self._stalled = True
                    self._process.kill()
                    self._heard = time.monotonic()

        self._spawn_task(look())

    def _take(self, data: bytes) -> None:
        self._heard = time.monotonic()
        message = messages.decode_from_worker(data)
        if isinstance(message, Refused):
            self._refused = message.message
            return
        if isinstance(message, Ready):
            self._ready_at, self._was_ready = self._heard, True
        self._on_message(message)

    def _ended(self) -> None:
        if not self._stopping:
            self._spawn_task(self._replace())

    async def _replace(self) -> None:
        await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._stalled:
            why = f"The worker made no progress for {self._settings.scheduling.stall_seconds:g} s."
        else:
            why = f"The worker process ended unexpectedly (exit code {self._process.exitcode})."
        if not self._was_ready:
            self._on_failure(self._refused or why)
            return
        sound = self._ready_at is not None and time.monotonic() - self._ready_at > SOUND_SECONDS
        pause, self._pause = (0.0 if sound else self._pause), self._longer(sound)
        log.error("%s Starting another one%s.", self._refused or why, f" in {pause:g} s" if pause else "")
        self._on_lost(why)
        await asyncio.sleep(pause)
        await self.start()

    def _longer(self, sound: bool) -> float:
        """How long the worker after the next one waits, if the next one fails soon."""
        return FIRST_PAUSE_SECONDS if sound else min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * self._pause))

    def _spawn_task(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
