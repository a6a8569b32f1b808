"""Quotas that all ingresses of a cluster share. Requests of keys without a quota do not wait for the coordinator."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol

from outrider.server.http.quotas import QuotaExceeded, refused
from outrider.server.settings import Auth
from outrider.server.telemetry.metrics import Metrics

RELEASE_SECONDS = 1.0


class SharedCounts(Protocol):
    """The coordinator, as an ingress calls it."""

    async def admit(self, principal: str, seconds_per_request: float) -> tuple[str, str, float] | None:
        """Counts a request; returns reason, message and seconds if the quota is used up."""

    async def release(self, principal: str) -> None:
        """Records that a request has ended. Returns when the coordinator knows it."""

    def charge(self, principal: str, requests: int) -> None:
        """Counts further requests."""


class SharedQuotas:
    """See `QuotaKeeper`."""

    def __init__(self, auth: Auth, metrics: Metrics, counts: SharedCounts, seconds_per_request: Callable[[], float]) -> None:
        self._auth = auth
        self._metrics = metrics
        self._counts = counts
        self._seconds_per_request = seconds_per_request
        self.held: Counter[str] = Counter()  # running requests of this ingress, by principal; the reports' truth
        self._calls: set[asyncio.Task[Any]] = set()

    async def admit(self, principal: str) -> None:
        """See `QuotaKeeper`. A request whose client hangs up meanwhile, at any moment, holds no place."""
        if not self._is_limited(principal):
            return
        self.held[principal] += 1
        asking = self._call(self._counts.admit(principal, self._seconds_per_request()))
        try:
            refusal: tuple[str, str, float] | None = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda asked: self._give_back(principal, asked))
            raise
        except Exception:
            self.held[principal] -= 1
            raise
        if refusal is not None:
            self.held[principal] -= 1
            raise refused(QuotaExceeded(*refusal), self._metrics)

    def _call(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a call outside of the request's context: Ray cancels what a cancelled request has called."""
        task = asyncio.get_running_loop().create_task(call, context=Context())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _give_back(self, principal: str, asked: asyncio.Task[tuple[str, str, float] | None]) -> None:
        """Ends a request that nobody waits for, once the coordinator has counted it or not."""
        if asked.cancelled() or asked.exception() is not None or asked.result() is not None:
            self.held[principal] -= 1
        else:
            self.held[principal] -= 1
            self._call(self._counts.release(principal))

    async def release(self, principal: str) -> None:
        """See `QuotaKeeper`. An answer waits for a lost coordinator for `RELEASE_SECONDS` only."""
        if self._is_limited(principal):
            self.held[principal] -= 1
            await asyncio.wait({self._call(self._counts.release(principal))}, timeout=RELEASE_SECONDS)

    def charge(self, principal: str, requests: int) -> None:
        """See `QuotaKeeper`."""
        if requests and self._is_limited(principal):
            self._counts.charge(principal, requests)

    def _is_limited(self, principal: str) -> bool:
        key = self._auth.keys.get(principal)
        own = key is not None and (key.max_concurrent or key.requests_per_minute)
        return bool(own or self._auth.concurrent_limit or self._auth.requests_per_minute)
