"""Saves one session at a time in a thread, so that nobody waits for a disk.

Promises that `stop` returns when no rows are read any more, after one page at most; what follows, such as the flush to the
disk, needs no rows and goes on.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from outrider.drafters.registry import arrays_of
from outrider.server.worker.session import Session
from outrider.server.worker.storage.contents import Contents
from outrider.server.worker.storage.session_files import SessionFiles


class Saver:
    """Writes sessions. All methods are called by one thread."""

    def __init__(self, files: SessionFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._saving: tuple[Contents, Session] | None = None  # what is being saved; the session's rows may be read
        self._executor = ThreadPoolExecutor(1, "outrider-saver")
        self._running: Future[Any] | None = None

    def save_next(self, sessions: Iterable[Session]) -> None:
        """Begins to save the first session that has changed, if none is being saved."""
        if self._running is not None and not self._running.done():
            return
        if (session := next((session for session in sessions if session.has_changed), None)) is not None:
            self._begin(session)
        elif self._files.sweep_is_due:
            self._running = self._executor.submit(self._files.sweep)

    def save_all(self, sessions: Iterable[Session], seconds: float) -> None:
        """Saves the sessions that have changed, in this order and as far as the time allows. Call it last."""
        deadline = self._clock() + seconds
        self.wait(seconds)
        self.stop()
        for session in sessions:
            if session.has_changed and self._clock() < deadline:
                self._begin(session)
                self.wait(deadline - self._clock())
        self.stop()
        self._executor.shutdown()

    def _begin(self, session: Session) -> None:
        """Begins to save a session, after the one before it."""
        assert session.key is not None
        principal, text = session.key.principal, session.text.tokens
        name = session.key.name if isinstance(session.key.name, str) else None
        session.file = session.file or self._files.path_of(principal, name, text)
        learned = {drafter: arrays_of(state) for drafter, state in session.drafters.items()}
        contents = Contents.of(principal, name, session.verifier, learned)
        self.wait(None)
        self._saving = contents, session
        self._running = self._executor.submit(self._files.save, session.file, contents)
        session.saved = True  # if it is stopped or fails, the next request tries again

    def stop(self) -> None:
        """Waits until no rows are read. A session whose rows have not all been read is saved again later."""
        if self._saving is not None:
            (contents, session), self._saving = self._saving, None
            if not contents.stop():
                session.saved = False

    def wait(self, seconds: float | None) -> None:
        """Waits for the end of the session that is being saved."""
        if self._running is not None:
            wait([self._running], None if seconds is None else max(0.0, seconds))
