"""Sessions: a conversation's KV cache and its drafters' state, kept between requests up to a capacity.

Promises that two principals never share a session, and that a request without a session id leaves no state.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from drafters.interface import Drafter
from drafters.options import DrafterName
from drafters.registry import Resources, make
from verify.model.cache import KVCache
from verify.model.runner import ModelRunner
from verify.verifier import TreeVerifier


@dataclass(eq=False)
class Session:
    """The state of one conversation."""

    verifier: TreeVerifier
    drafters: dict[DrafterName, Drafter] = field(default_factory=dict)
    busy: bool = False
    released_at: float = 0.0  # the clock's time at the last release

    def drafter(self, name: DrafterName, resources: Resources) -> Drafter:
        """The session's drafter of this name, made at first use."""
        if name not in self.drafters:
            self.drafters[name] = make(name, resources)
        return self.drafters[name]


class SessionStore:
    """The worker's sessions. Evicts idle ones beyond `capacity`, and those idle for longer than `ttl_seconds`.

    Busy and recently used sessions hold a slot (a KV cache on the device); the others are swapped out to host memory.
    """

    def __init__(
        self,
        runner: ModelRunner,
        capacity: int,
        ttl_seconds: float,
        slots: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` is the number of KV caches on the device; default: `capacity` + 1."""
        self._runner = runner
        self._capacity = capacity
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self.slots = capacity + 1 if slots is None else slots
        self._free = [runner.new_cache() for _ in range(self.slots)]

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def usage_ratio(self) -> float:
        """The share of the slots' positions that hold committed tokens."""
        used = sum(len(session.verifier.sequence) for session in self._sessions.values() if not session.verifier.is_swapped_out)
        return used / (self._runner.context_tokens * self.slots)

    def acquire(self, key: str | None) -> Session | None:
        """The session of `key`, or a new one (unnamed for None). Returns None while the session or every slot is busy."""
        self.expire()
        session = None if key is None else self._sessions.get(key)
        if session is not None and session.busy:
            return None
        if session is None or session.verifier.is_swapped_out:
            slot = self._take_slot()
            if slot is None:
                return None
            if session is None:
                session = Session(TreeVerifier(self._runner, slot))
            else:
                session.verifier.swap_in(slot)
        session.busy = True
        if key is not None:
            self._sessions[key] = session
            self._sessions.move_to_end(key)
        return session

    def _take_slot(self) -> KVCache | None:
        """A free slot; if there is none, that of the least recently used idle session, which is swapped out."""
        if self._free:
            return self._free.pop()
        for session in self._sessions.values():
            if not session.busy and not session.verifier.is_swapped_out:
                return session.verifier.swap_out()
        return None

    def release(self, session: Session) -> None:
        """Ends the use of `session` by a request."""
        session.busy = False
        session.released_at = self._clock()
        if session not in self._sessions.values():
            self._forget(session)
        self.expire()

    def expire(self) -> int:
        """Evicts idle sessions beyond the capacity or the time to live; returns their number."""
        before = len(self._sessions)
        idle = [key for key, session in self._sessions.items() if not session.busy]
        surplus = len(self._sessions) - self._capacity
        for i, key in enumerate(idle):
            if i < surplus or self._clock() - self._sessions[key].released_at > self._ttl_seconds:
                self._forget(self._sessions.pop(key))
        return before - len(self._sessions)

    def _forget(self, session: Session) -> None:
        slot = session.verifier.release()
        if slot is not None:
            self._free.append(slot)
