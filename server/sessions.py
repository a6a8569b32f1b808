"""Sessions: the KV cache of a conversation and what its drafters learned, kept between requests under a cap.

Promises that two principals never share a session, and that a request without a session id leaves nothing behind.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from drafters.draft import Drafter
from drafters.registry import DrafterName, Resources, make
from verify.model import ModelRunner
from verify.verifier import TreeVerifier


@dataclass
class Session:
    """One conversation's state in the worker."""

    verifier: TreeVerifier
    drafters: dict[DrafterName, Drafter] = field(default_factory=dict)
    busy: bool = False
    used: float = 0.0  # time of the last release, seconds

    def drafter(self, name: DrafterName, resources: Resources) -> Drafter:
        """The session's own drafter of that name, made at first use."""
        if name not in self.drafters:
            self.drafters[name] = make(name, resources)
        return self.drafters[name]


class SessionStore:
    """The sessions of one worker; at most `capacity` idle ones, none idle for longer than `ttl_seconds`."""

    def __init__(
        self, runner: ModelRunner, capacity: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner = runner
        self._capacity = capacity
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._kept: OrderedDict[str, Session] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def usage_ratio(self) -> float:
        """Committed positions over all positions of the kept sessions."""
        used = sum(len(session.verifier.tokens) for session in self._kept.values())
        return used / (self._runner.context_tokens * max(1, len(self._kept)))

    def acquire(self, key: str | None) -> Session | None:
        """The session of `key`, made where there is none, or a nameless one; None while another request holds it."""
        self.expire()
        if key is None:
            return Session(TreeVerifier(self._runner, self._runner.new_cache()), busy=True)
        session = self._kept.get(key)
        if session is None:
            session = self._kept[key] = Session(TreeVerifier(self._runner, self._runner.new_cache()))
        if session.busy:
            return None
        session.busy = True
        self._kept.move_to_end(key)
        return session

    def release(self, session: Session) -> None:
        """The request that held `session` is over."""
        session.busy = False
        session.used = self._clock()
        self.expire()

    def expire(self) -> int:
        """Forgets idle sessions that are too old or too many; returns how many."""
        before = len(self._kept)
        idle = [key for key, session in self._kept.items() if not session.busy]
        surplus = len(self._kept) - self._capacity
        for i, key in enumerate(idle):
            if i < surplus or self._clock() - self._kept[key].used > self._ttl_seconds:
                del self._kept[key]
        return before - len(self._kept)
