"""Decides which requests run: each waits in a line, runs as a job, may be paused, and leaves.

Promises that a paused job and one that waits hold nothing that another needs. Knows nothing about messages and forwards.
"""

from collections import deque
from collections.abc import Callable, MutableSequence
from typing import TypeAlias, TypeVar

from outrider.server.engine.messages import Request
from outrider.server.worker.job import Job
from outrider.server.worker.sessions import SessionStore

Entry: TypeAlias = Request | Job
E = TypeVar("E", bound=Entry)


class Scheduler:
    """The lines of a worker's requests."""

    def __init__(self, sessions: SessionStore, max_active: int) -> None:
        """At most `max_active` jobs answer at once."""
        self.active: list[Job] = []  # in the order in which they began
        self.max_active = max_active
        self._sessions = sessions
        self._waiting: deque[Entry] = deque()  # new requests, and jobs whose pause has ended
        self._tried: dict[str, int] = {}  # `SessionStore.changes` at the last try of each waiting request, by id
        self._paused: dict[str, Entry] = {}  # by request id

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, nor waits."""
        return not (self.active or self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def admit(self, start: Callable[[Entry], bool]) -> None:
        """Starts those that wait in order, while fewer than `max_active` jobs answer, or are about to.

        Skips those that `start` leaves waiting, because their session is busy or no KV cache is free. They are tried again
        after a change only: each try looks for the session of a whole prompt.
        """
        skipped: list[Entry] = []
        while self._waiting and sum(not job.reads for job in self.active) < self.max_active:
            entry = self._waiting.popleft()
            if self._tried.pop(entry.id, None) == self._sessions.changes or not start(entry):
                self._tried[entry.id] = self._sessions.changes
                skipped.append(entry)
        self._waiting.extendleft(reversed(skipped))

    @property
    def is_crowded(self) -> bool:
        """Whether the KV caches have no room for a round of all jobs. Swaps idle and paused sessions out to make room."""
        wanted = [(job.stream.verifier.cache, job.stream.most_rows) for job in self.active]
        return not self._sessions.fits(wanted) and len(self.active) > 1

    def hold_last(self) -> None:
        """Lets the job that came last wait, before all others."""
        job = self.active.pop()
        self._sessions.pause(job.session)
        self._waiting.appendleft(job)

    def pause(self, request_id: str) -> None:
        """Takes a request out of line until `resume`."""
        if (entry := self.remove(request_id)) is not None:
            self._paused[request_id] = entry
            if isinstance(entry, Job):
                self._sessions.pause(entry.session)

    def resume(self, request_id: str) -> None:
        """Adds a paused request to the end of the line."""
        if entry := self._paused.pop(request_id, None):
            self._waiting.append(entry)

    def remove(self, request_id: str) -> Entry | None:
        """Takes a request out of line, wherever it is; None if it has ended."""
        self._tried.pop(request_id, None)
        return self._paused.pop(request_id, None) or take(self.active, request_id) or take(self._waiting, request_id)


def take(line: MutableSequence[E], request_id: str) -> E | None:
    """Takes the entry of a request out of a line; None if it is not there."""
    for index, entry in enumerate(line):
        if entry.id == request_id:
            del line[index]
            return entry
    return None
