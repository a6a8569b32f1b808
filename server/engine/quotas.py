"""What one key may use: requests at once, and requests a minute. Each key has its own; nobody else's count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from server.engine.queue import QueueFull
from server.settings import Auth


@dataclass
class Used:
    """By one principal."""

    at_once: int = 0
    left: float = 0.0  # requests that may come now
    since: float = 0.0  # when `left` was right


class Quotas:
    """Counts requests by principal."""

    def __init__(self, auth: Auth, clock: Callable[[], float] = time.monotonic) -> None:
        self._auth = auth
        self._clock = clock
        self._used: dict[str, Used] = {}

    @contextmanager
    def hold(self, principal: str, seconds_per_request: float) -> Iterator[None]:
        """While one request is here. Raises QueueFull where the principal has used up what it may."""
        key = self._auth.keys.get(principal)
        most = (key and key.max_concurrent) or self._auth.max_concurrent
        per_minute = (key and key.requests_per_minute) or self._auth.requests_per_minute
        used = self._used.setdefault(principal, Used(left=per_minute or 0, since=self._clock()))
        if most is not None and used.at_once >= most:
            message = f"This key may have {most} requests at once; wait for one of them to end."
            raise QueueFull("concurrency", message, seconds_per_request)
        self._spend(used, per_minute)
        used.at_once += 1
        try:
            yield
        finally:
            used.at_once -= 1

    def _spend(self, used: Used, per_minute: int | None) -> None:
        """One request of a bucket that fills with `per_minute` and holds as many."""
        if per_minute is None:
            return
        now = self._clock()
        used.left = min(per_minute, used.left + (now - used.since) * per_minute / 60)
        used.since = now
        if used.left < 1:
            message = f"This key may send {per_minute} requests a minute; send the next one later."
            raise QueueFull("rate", message, (1 - used.left) * 60 / per_minute)
        used.left -= 1
