"""The request queue: a bounded, fair queue in front of the worker. Knows nothing about the requests' content.

Promises the next turn to the waiting principal with the fewest running requests; of equals, to the one whose last turn is
oldest. Among one principal's requests, the lowest priority number runs first, and requests of one session run one after the
other. While a principal waits, no other one keeps two places more than it has: its latest request is paused. A principal
without a waiting request always gets a place, and above the queue's bounds only those are refused who would have more than an
equal share of them. So neither many requests, nor long ones, nor a high priority of one client delay another client's first
request. A request whose long prompt is being read delays no other one, while there are KV caches: it takes a place only when
its answer begins, and leaves the last KV cache to a short prompt.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.server.fair_shares import exceeds

# The mean duration gives earlier requests this weight.
EMA_WEIGHT = 0.9
# Waiting prompts take this many tokens in all, some 40 MB: one prompt of the longest contexts that models have.
MAX_WAITING_TOKENS = 1 << 20
# A longer prompt takes several rounds to read, unless a session has most of it.
LONG_PROMPT_TOKENS = 512


class QueueFull(Exception):
    """The queue has no room for the request. Retry after `seconds`."""

    def __init__(self, reason: str, message: str, seconds: float) -> None:
        super().__init__(message)
        self.reason = reason  # one of outrider.server.telemetry.metrics.REFUSALS
        self.seconds = seconds


@dataclass(eq=False)
class Place:
    id: str
    principal: str
    tokens: int  # prompt length
    priority: int  # among the principal's own requests; lower runs first
    session: str | None = None  # only one request uses a session at a time
    state: Literal["waiting", "running", "held"] = "waiting"  # a held request gets no turn until it is resumed
    started: bool = False  # whether it has had a turn, so that the worker has its state
    answers: bool = False  # whether its prompt has been read
    since: float = 0.0  # the clock's time at the latest turn
    seconds: float = 0.0  # time in earlier turns

    @property
    def reads(self) -> bool:
        """Whether it has a long prompt that may still be read."""
        return self.tokens > LONG_PROMPT_TOKENS and not self.answers


class Queue:
    """Closed until `open`: requests wait but none runs."""

    def __init__(
        self,
        max_active: int,
        max_waiting: int,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
        on_run: Callable[[str], None] = lambda _: None,
        on_pause: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Calls `on_run` with a request's id at each of its turns, and `on_pause` when a turn ends before the request does."""
        self._max_active = max_active
        self._slots = 1 << 62
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._on_run = on_run
        self._on_pause = on_pause
        self._clock = clock
        self._places: dict[str, Place] = {}  # in order of arrival
        # The number of each principal's last turn, also without a request in the queue: whoever comes back is no newcomer.
        self._last_turn: dict[str, int] = {}
        self._turns = 0
        self._open = False
        self.seconds_per_request = 1.0  # seconds of a request in the worker (EMA)

    @property
    def waiting(self) -> int:
        return len(self._in_state("waiting"))

    @property
    def active(self) -> int:
        return len(self._in_state("running"))

    @property
    def seconds_to_halve(self) -> float:
        """Seconds until half of the waiting requests have had their turn, at the measured rate."""
        return self.seconds_per_request * max(1, math.ceil(self.waiting / 2)) / self._max_active

    def enter(
        self, id: str, always: bool = False, priority: int = 0, principal: str = "", tokens: int = 0, session: str | None = None
    ) -> None:
        """Adds a request. Always call `leave` afterwards. Raises QueueFull unless `always`."""
        place = Place(id, principal, tokens, priority, session)
        if not (always or (self._open and self._fitting([place]))):
            self._check_bounds(principal, tokens)
        self._places[id] = place
        self._grant()

    def _check_bounds(self, principal: str, tokens: int) -> None:
        waiting, lengths = Counter[str](), Counter[str]()
        for place in self._in_state("waiting"):
            waiting[place.principal] += 1
            lengths[place.principal] += place.tokens
        if self._max_waiting == 0 or exceeds(self._max_waiting, waiting, principal, 1):
            message = "The server is busy and its queue is full; try again shortly."
            raise QueueFull("queue_full", message, self.seconds_to_halve)
        if exceeds(self._max_waiting_tokens, lengths, principal, tokens):
            message = "The server is busy and its queue has no room for a prompt of this length; try again shortly."
            raise QueueFull("tokens", message, self.seconds_to_halve)

    def leave(self, id: str) -> None:
        """Removes a request; has no effect the second time."""
        place = self._places.pop(id, None)
        if place is None:
            return
        if place.state == "running":
            place.seconds += self._clock() - place.since
        if place.started:
            self.seconds_per_request = EMA_WEIGHT * self.seconds_per_request + (1 - EMA_WEIGHT) * place.seconds
        self._grant()

    def hold(self, id: str) -> None:
        """Gives the request no turn until `resume`; pauses it if it is running."""
        place = self._places.get(id)
        if place is not None:
            self._stop(place, "held")
            self._grant()

    def surplus(self, principal: str) -> str | None:
        """The held request of a principal to end: the first one, if more are held than may run at once; else None."""
        held = [place.id for place in self._in_state("held") if place.principal == principal]
        return held[0] if len(held) > self._max_active else None

    def resume(self, id: str) -> None:
        """Lets a held request wait for its next turn."""
        place = self._places.get(id)
        if place is not None and place.state == "held":
            place.state = "waiting"
            self._grant()

    def answer(self, id: str) -> None:
        """The prompt of a request has been read."""
        if (place := self._places.get(id)) is not None:
            place.answers = True
            self._grant()

    def open(self, max_active: int | None = None, slots: int | None = None) -> None:
        """Lets requests run: a worker is ready. `max_active` replaces the number that may answer at once.

        `slots` is the number that may run at once, if it is more.
        """
        self._max_active, self._slots = max_active or self._max_active, slots or self._slots
        self._open = True
        self._grant()

    def allow(self, max_active: int) -> None:
        """Sets how many requests may run at once; those that run already go on."""
        self._max_active = max_active
        self._grant()

    def close(self) -> list[str]:
        """Stops granting turns: the worker was lost. Returns the requests whose state is lost with it; the others wait."""
        self._open = False
        return [place.id for place in self._places.values() if place.started]

    def _grant(self) -> None:
        """Gives turns to waiting requests while there are places for them."""
        while self._open and (waiting := self._eligible()):
            running = Counter(place.principal for place in self._in_state("running"))
            fitting = self._fitting(waiting)
            next_place = min(fitting or waiting, key=lambda place: self._rank(place, running))  # the earliest of equals
            if not fitting and not self._pause_for(next_place.principal):
                return
            self._turns += 1
            self._last_turn[next_place.principal] = self._turns
            next_place.state, next_place.started, next_place.since = "running", True, self._clock()
            self._on_run(next_place.id)

    @property
    def _answering(self) -> list[Place]:
        return [place for place in self._in_state("running") if not place.reads]

    def _fitting(self, waiting: Sequence[Place]) -> list[Place]:
        """The waiting requests for which there is room. Of a principal's long prompts, all but one leave a KV cache free."""
        running, most = self._in_state("running"), max(self._slots, self._max_active)
        if len(self._answering) >= self._max_active:
            return []
        reading = {place.principal for place in running if place.reads}
        return [each for each in waiting if len(running) + (each.reads and each.principal in reading) < most]

    def _eligible(self) -> list[Place]:
        """The waiting requests whose session no other request uses: in the worker, they would wait in a place."""
        users: dict[tuple[str, str | None], str] = {}
        for place in self._places.values():
            if place.started and place.session is not None:
                users[place.principal, place.session] = place.id
        return [each for each in self._in_state("waiting") if users.get((each.principal, each.session), each.id) == each.id]

    def _rank(self, place: Place, running: Counter[str]) -> tuple[int, int, int]:
        return running[place.principal], self._last_turn.get(place.principal, 0), place.priority

    def _pause_for(self, principal: str) -> bool:
        """Pauses a request of the principal with the most places, if that has two more than `principal`."""
        answering = self._answering
        taken = answering if len(answering) >= self._max_active else self._in_state("running")
        places = Counter(place.principal for place in taken)
        [(largest, most)] = places.most_common(1)
        if most - places[principal] < 2:
            return False
        candidates = [place for place in taken if place.principal == largest]
        self._stop(max(candidates, key=lambda place: place.since), "waiting")
        return True

    def _stop(self, place: Place, state: Literal["waiting", "held"]) -> None:
        was_running, place.state = place.state == "running", state
        if was_running:
            place.seconds += self._clock() - place.since
            self._on_pause(place.id)

    def _in_state(self, state: str) -> list[Place]:
        return [place for place in self._places.values() if place.state == state]
