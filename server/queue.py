"""The queue before the worker: who is at work, who waits, and who comes next. Bounded; knows ids only."""

from __future__ import annotations

import asyncio


class QueueFull(Exception):
    """There is no room for one more who waits."""


class Queue:
    """The lowest priority number first, then first come, first served. Closed until `open`: everybody waits."""

    def __init__(self, max_active: int, max_waiting: int) -> None:
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._waiting: dict[str, tuple[int, asyncio.Future[None]]] = {}  # priority and turn, in the order they came
        self._active: set[str] = set()
        self._open = False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """How many are at work."""
        return len(self._active)

    def enter(self, id: str, always: bool = False, priority: int = 0) -> asyncio.Future[None]:
        """A future that is done when the turn has come. `leave` in any case. Raises QueueFull, unless `always`."""
        free = self._open and len(self._active) < self._max_active
        if not (always or free) and len(self._waiting) >= self._max_waiting:
            raise QueueFull
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id] = (priority, turn)
        self._grant()
        return turn

    def leave(self, id: str) -> None:
        """Makes room, if that has not been done yet."""
        self._waiting.pop(id, None)
        self._active.discard(id)
        self._grant()

    def open(self) -> None:
        """There is a worker."""
        self._open = True
        self._grant()

    def close(self) -> list[str]:
        """The worker is gone: whoever waits goes on waiting. Returns who was at work."""
        self._open = False
        return list(self._active)

    def fail(self, error: Exception) -> None:
        """There will be no worker: whoever waits gets `error`."""
        self._open = False
        for _, turn in self._waiting.values():
            if not turn.done():
                turn.set_exception(error)
        self._waiting.clear()

    def _grant(self) -> None:
        while self._open and self._waiting and len(self._active) < self._max_active:
            id = min(self._waiting, key=lambda each: self._waiting[each][0])  # of equals, the one that came first
            _, turn = self._waiting.pop(id)
            if not turn.done():  # else its waiter was cancelled
                self._active.add(id)
                turn.set_result(None)
