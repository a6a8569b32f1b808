"""Shares of a resource that has a bound, such as requests that wait or the bytes that they take.

Promises that a principal which holds nothing is always admitted, that nobody is refused while the bound has room, and that
above it only those are refused who would hold more than an equal share. Knows nothing about what is held.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class NoRoom(Exception):
    """The bound is reached, and the principal would hold more than its share."""


def exceeds(bound: int, held: Mapping[str, int], principal: str, amount: int) -> bool:
    """Whether there is no room for a principal to hold more, where `held` is what each one holds."""
    own = held.get(principal, 0)
    return own > 0 and sum(held.values()) + amount > bound and own + amount > bound // len(held)


class Ledger:
    """The amount that each principal holds. Any thread may call it."""

    def __init__(self, bound: int) -> None:
        """`bound`: of all principals together, in any unit. Callers refuse what is larger than it alone."""
        self.bound = bound
        self._held: Counter[str] = Counter()  # of the principals that hold something
        self._lock = threading.RLock()  # a finalizer may call `release` within another call

    def take(self, principal: str, amount: int) -> None:
        """Records that a principal holds more. Call `release` for it. Raises NoRoom."""
        with self._lock:
            if exceeds(self.bound, self._held, principal, amount):
                raise NoRoom
            self._set(principal, self._held[principal] + amount)

    def release(self, principal: str, amount: int) -> None:
        """Takes back what `take` has recorded."""
        with self._lock:
            self._set(principal, self._held[principal] - amount)

    def _set(self, principal: str, amount: int) -> None:
        self._held[principal] = amount
        if not amount:
            del self._held[principal]

    @contextmanager
    def hold(self, principal: str, amount: int) -> Iterator[None]:
        """Holds an amount for the length of the block. Raises NoRoom."""
        self.take(principal, amount)
        try:
            yield
        finally:
            self.release(principal, amount)
