"""The queue before the worker: who is at work, who waits, and who comes next. Bounded; knows no text.

Promises turns to whoever of the waiting principals has the fewest requests at work, then to the one whose last turn is longest
ago; of one principal's requests, to the one with the lowest priority number. So neither one client's hundred requests nor the
priority that it gives itself keep another's first one waiting.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MEMORY = 0.9  # weight of earlier requests in the measured time


class QueueFull(Exception):
    """There is no room for one more who waits. Come again after `seconds`."""

    def __init__(self, reason: str, message: str, seconds: float) -> None:
        super().__init__(message)
        self.reason = reason  # one of server.telemetry.metrics.REFUSALS
        self.seconds = seconds


@dataclass(frozen=True)
class Place:
    """One request in the queue."""

    principal: str
    tokens: int  # of its prompt
    priority: int  # among its principal's own; lower comes first
    turn: asyncio.Future[None] = field(compare=False)


class Queue:
    """Closed until `open`: everybody waits."""

    def __init__(
        self, max_active: int, max_waiting: int, max_waiting_tokens: int = 1 << 62, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._waiting: dict[str, Place] = {}  # in the order they came
        self._active: dict[str, tuple[str, float]] = {}  # principal, and when the turn came
        self._last_turn: dict[str, int] = {}  # of each principal with requests here, the number of its last turn
        self._turns = 0
        self._open = False
        self.seconds_per_request = 1.0  # in the worker; a decaying mean

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """How many prompt tokens wait."""
        return sum(place.tokens for place in self._waiting.values())

    @property
    def active(self) -> int:
        """How many are at work."""
        return len(self._active)

    @property
    def seconds_to_halve(self) -> float:
        """When half of those who wait now will have had their turn, at the measured rate."""
        return self.seconds_per_request * max(1, math.ceil(self.waiting / 2)) / self._max_active

    def enter(
        self, id: str, always: bool = False, priority: int = 0, principal: str = "", tokens: int = 0
    ) -> asyncio.Future[None]:
        """A future that is done when the turn has come. `leave` in any case. Raises QueueFull, unless `always`."""
        free = self._open and len(self._active) < self._max_active
        if not (always or free):
            self._check(tokens)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id] = Place(principal, tokens, priority, turn)
        self._grant()
        return turn

    def _check(self, tokens: int) -> None:
        if len(self._waiting) >= self._max_waiting:
            message = "The server is busy and its queue is full; try again shortly."
            raise QueueFull("queue_full", message, self.seconds_to_halve)
        if self._waiting and self.waiting_tokens + tokens > self._max_waiting_tokens:
            message = "The server is busy and its queue has no room for so long a prompt; try again shortly."
            raise QueueFull("tokens", message, self.seconds_to_halve)

    def leave(self, id: str) -> None:
        """Makes room, if that has not been done yet."""
        place = self._waiting.pop(id, None)
        principal, since = self._active.pop(id, (None, 0.0))
        if principal is not None:
            took = self._clock() - since
            self.seconds_per_request = MEMORY * self.seconds_per_request + (1 - MEMORY) * took
        gone = place.principal if place else principal
        if gone is not None and not self._has(gone):
            self._last_turn.pop(gone, None)
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
        for place in self._waiting.values():
            if not place.turn.done():
                place.turn.set_exception(error)
        self._waiting.clear()

    def _grant(self) -> None:
        while self._open and self._waiting and len(self._active) < self._max_active:
            id = min(self._waiting, key=self._rank)  # of equals, the one that came first
            place = self._waiting.pop(id)
            if not place.turn.done():  # else its waiter was cancelled
                self._turns += 1
                self._last_turn[place.principal] = self._turns
                self._active[id] = place.principal, self._clock()
                place.turn.set_result(None)

    def _rank(self, id: str) -> tuple[int, int, int]:
        place = self._waiting[id]
        at_work = sum(principal == place.principal for principal, _ in self._active.values())
        return at_work, self._last_turn.get(place.principal, 0), place.priority

    def _has(self, principal: str) -> bool:
        waits = any(place.principal == principal for place in self._waiting.values())
        return waits or any(each == principal for each, _ in self._active.values())
