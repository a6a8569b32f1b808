"""The request queue: a bounded, fair queue in front of the worker. Knows nothing about the requests' content.

Promises the next turn to the waiting principal with the fewest running requests; of equals, to the one whose last turn is
oldest. Among one principal's requests, the lowest priority number runs first. So neither many requests nor a high priority of
one client delay another client's first request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

EMA_WEIGHT = 0.9  # of earlier requests in the mean duration


class QueueFull(Exception):
    """The queue has no room for the request. Retry after `seconds`."""

    def __init__(self, reason: str, message: str, seconds: float) -> None:
        super().__init__(message)
        self.reason = reason  # one of server.telemetry.metrics.REFUSALS
        self.seconds = seconds


@dataclass(frozen=True)
class Place:
    """A waiting request."""

    principal: str
    tokens: int  # prompt length
    priority: int  # among the principal's own requests; lower runs first
    turn: asyncio.Future[None] = field(compare=False)


class Queue:
    """Closed until `open`: requests wait but none runs."""

    def __init__(
        self, max_active: int, max_waiting: int, max_waiting_tokens: int = 1 << 62, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._waiting: dict[str, Place] = {}  # in order of arrival
        self._active: dict[str, tuple[str, float]] = {}  # principal, and the clock's time at its turn
        self._last_turn: dict[str, int] = {}  # number of the last turn, for principals with waiting or running requests
        self._turns = 0
        self._open = False
        self.seconds_per_request = 1.0  # in the worker (EMA)

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """The number of prompt tokens of the waiting requests."""
        return sum(place.tokens for place in self._waiting.values())

    @property
    def active(self) -> int:
        """The number of running requests."""
        return len(self._active)

    @property
    def seconds_to_halve(self) -> float:
        """Seconds until half of the waiting requests have had their turn, at the measured rate."""
        return self.seconds_per_request * max(1, math.ceil(self.waiting / 2)) / self._max_active

    def enter(
        self, id: str, always: bool = False, priority: int = 0, principal: str = "", tokens: int = 0
    ) -> asyncio.Future[None]:
        """A future that is done at the request's turn. Always call `leave` afterwards. Raises QueueFull unless `always`."""
        free = self._open and len(self._active) < self._max_active
        if not (always or free):
            self._check_bounds(tokens)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id] = Place(principal, tokens, priority, turn)
        self._grant()
        return turn

    def _check_bounds(self, tokens: int) -> None:
        if len(self._waiting) >= self._max_waiting:
            message = "The server is busy and its queue is full; try again shortly."
            raise QueueFull("queue_full", message, self.seconds_to_halve)
        if self._waiting and self.waiting_tokens + tokens > self._max_waiting_tokens:
            message = "The server is busy and its queue has no room for a prompt of this length; try again shortly."
            raise QueueFull("tokens", message, self.seconds_to_halve)

    def leave(self, id: str) -> None:
        """Removes a waiting or running request; has no effect the second time."""
        place = self._waiting.pop(id, None)
        principal, since = self._active.pop(id, (None, 0.0))
        if principal is not None:
            seconds = self._clock() - since
            self.seconds_per_request = EMA_WEIGHT * self.seconds_per_request + (1 - EMA_WEIGHT) * seconds
        owner = place.principal if place else principal
        if owner is not None and not self._has_requests(owner):
            self._last_turn.pop(owner, None)
        self._grant()

    def open(self) -> None:
        """Lets requests run: a worker is ready."""
        self._open = True
        self._grant()

    def close(self) -> list[str]:
        """Stops granting turns: the worker was lost. Waiting requests keep waiting. Returns the running ones."""
        self._open = False
        return list(self._active)

    def fail(self, error: Exception) -> None:
        """Fails all waiting requests with `error`: no worker will run."""
        self._open = False
        for place in self._waiting.values():
            if not place.turn.done():
                place.turn.set_exception(error)
        self._waiting.clear()

    def _grant(self) -> None:
        while self._open and self._waiting and len(self._active) < self._max_active:
            id = min(self._waiting, key=self._rank)  # the earliest of equals
            place = self._waiting.pop(id)
            if not place.turn.done():  # done here means cancelled
                self._turns += 1
                self._last_turn[place.principal] = self._turns
                self._active[id] = place.principal, self._clock()
                place.turn.set_result(None)

    def _rank(self, id: str) -> tuple[int, int, int]:
        place = self._waiting[id]
        running = sum(principal == place.principal for principal, _ in self._active.values())
        return running, self._last_turn.get(place.principal, 0), place.priority

    def _has_requests(self, principal: str) -> bool:
        waiting = any(place.principal == principal for place in self._waiting.values())
        return waiting or any(each == principal for each, _ in self._active.values())
