"""Sessions: the KV cache of a conversation and what its drafters learned, kept between requests under a cap.

Promises that two principals never share a session, and that a request without a session id leaves nothing behind.
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
    """The sessions of one worker; at most `capacity` idle ones, none idle for longer than `ttl_seconds`.

    Those that are at work, or were last, have a slot on the device each; the others' rows wait in host memory.
    """

    def __init__(
        self,
        runner: ModelRunner,
        capacity: int,
        ttl_seconds: float,
        slots: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` on the device, one more than `capacity` where it is not given."""
        self._runner = runner
        self._capacity = capacity
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._kept: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self.slots = capacity + 1 if slots is None else slots
        self._free = [runner.new_cache() for _ in range(self.slots)]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def usage_ratio(self) -> float:
        """Committed positions over all positions of the slots."""
        used = sum(len(session.verifier.sequence) for session in self._kept.values() if not session.verifier.is_swapped_out)
        return used / (self._runner.context_tokens * self.slots)

    def acquire(self, key: str | None) -> Session | None:
        """The session of `key`, made where there is none, or a nameless one; None while it or all slots are at work."""
        self.expire()
        session = None if key is None else self._kept.get(key)
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
            self._kept[key] = session
            self._kept.move_to_end(key)
        return session

    def _take_slot(self) -> KVCache | None:
        """A free slot, if need be that of the session that has been idle for longest."""
        if self._free:
            return self._free.pop()
        for session in self._kept.values():
            if not session.busy and not session.verifier.is_swapped_out:
                return session.verifier.swap_out()
        return None

    def release(self, session: Session) -> None:
        """The request that held `session` is over."""
        session.busy = False
        session.used = self._clock()
        if session not in self._kept.values():
            self._forget(session)
        self.expire()

    def expire(self) -> int:
        """Forgets idle sessions that are too old or too many; returns how many."""
        before = len(self._kept)
        idle = [key for key, session in self._kept.items() if not session.busy]
        surplus = len(self._kept) - self._capacity
        for i, key in enumerate(idle):
            if i < surplus or self._clock() - self._kept[key].used > self._ttl_seconds:
                self._forget(self._kept.pop(key))
        return before - len(self._kept)

    def _forget(self, session: Session) -> None:
        slot = session.verifier.release()
        if slot is not None:
            self._free.append(slot)
