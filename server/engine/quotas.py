"""Quotas per API key: concurrent requests, and requests per minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from server.engine.queue import QueueFull
from server.settings import Auth


@dataclass
class Usage:
    """One principal's use of its quotas."""

    concurrent: int = 0  # running and queued requests
    allowance: float = 0.0  # requests that may arrive now: the token bucket's level
    updated_at: float = 0.0  # the clock's time at the last update of `allowance`


class Quotas:
    """Counts requests by principal, and refuses those beyond the quota."""

    def __init__(self, auth: Auth, clock: Callable[[], float] = time.monotonic) -> None:
        self._auth = auth
        self._clock = clock
        self._usage: dict[str, Usage] = {}

    @contextmanager
    def hold(self, principal: str, seconds_per_request: float) -> Iterator[None]:
        """Counts one request while the context is open. Raises QueueFull if the principal's quota is used up."""
        key = self._auth.keys.get(principal)
        max_concurrent = (key and key.max_concurrent) or self._auth.max_concurrent
        per_minute = (key and key.requests_per_minute) or self._auth.requests_per_minute
        usage = self._usage.setdefault(principal, Usage(allowance=per_minute or 0, updated_at=self._clock()))
        if max_concurrent is not None and usage.concurrent >= max_concurrent:
            message = f"This key may have {max_concurrent} requests at once; wait for one of them to end."
            raise QueueFull("concurrency", message, seconds_per_request)
        self._spend(usage, per_minute)
        usage.concurrent += 1
        try:
            yield
        finally:
            usage.concurrent -= 1

    def _spend(self, usage: Usage, per_minute: int | None) -> None:
        """Takes one request from a token bucket of size `per_minute` that refills within a minute. Raises QueueFull."""
        if per_minute is None:
            return
        now = self._clock()
        usage.allowance = min(per_minute, usage.allowance + (now - usage.updated_at) * per_minute / 60)
        usage.updated_at = now
        if usage.allowance < 1:
            message = f"This key may send {per_minute} requests a minute; retry later."
            raise QueueFull("rate", message, (1 - usage.allowance) * 60 / per_minute)
        usage.allowance -= 1
