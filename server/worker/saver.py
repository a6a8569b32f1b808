"""Saves one session at a time in a thread, so that nobody waits for a disk.

Promises that `stop` returns when the rows are no longer read, after one chunk at most; what follows, such as the flush to the
disk, needs no rows and goes on.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from server.worker.session_files import SessionFiles
from server.worker.session_format import Contents


class Saver:
    """Writes sessions. All methods are called by one thread."""

    def __init__(self, files: SessionFiles) -> None:
        self._files = files
        self._executor = ThreadPoolExecutor(1, "outrider-saver")
        self._stopped, self._rows_read = threading.Event(), threading.Event()
        self._running: Future[bool] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a session is being saved."""
        return self._running is not None and not self._running.done()

    def start(self, path: Path, contents: Contents) -> None:
        """Begins to save a session, after the one before it."""
        self.wait(None)
        stopped, rows_read = self._stopped, self._rows_read = threading.Event(), threading.Event()
        self._running = self._executor.submit(self._files.save, path, contents, stopped.is_set, rows_read.set)

    def stop(self) -> bool:
        """Returns when no rows are read any more: whether all have been, so that the session will be saved."""
        if self._running is None:
            return True
        complete = self._rows_read.is_set()
        self._stopped.set()
        self._rows_read.wait()
        return complete

    def wait(self, seconds: float | None) -> None:
        """Waits for the end of the session that is being saved."""
        if self._running is not None:
            wait([self._running], None if seconds is None else max(0.0, seconds))

    def close(self) -> None:
        """Stops, and ends the thread."""
        self.stop()
        self._executor.shutdown()
