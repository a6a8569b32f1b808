"""Quotas that all ingresses of a cluster share. Requests of keys without a quota do not wait for the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from server.http.quotas import QuotaExceeded, refused
from server.settings import Auth
from server.telemetry.metrics import Metrics


class SharedCounts(Protocol):
    """The coordinator, as an ingress calls it."""

    async def admit(self, principal: str, seconds_per_request: float) -> tuple[str, str, float] | None:
        """Counts a request; returns reason, message and seconds if the quota is used up."""

    def release(self, principal: str) -> None:
        """A request has ended."""

    def charge(self, principal: str, requests: int) -> None:
        """Counts further requests."""


class SharedQuotas:
    """See `QuotaKeeper`."""

    def __init__(self, auth: Auth, metrics: Metrics, counts: SharedCounts, seconds_per_request: Callable[[], float]) -> None:
        self._auth = auth
        self._metrics = metrics
        self._counts = counts
        self._seconds_per_request = seconds_per_request
        self.held: Counter[str] = Counter()  # running requests of this ingress, by principal

    async def admit(self, principal: str) -> None:
        """As `QuotaKeeper`."""
        if self._is_limited(principal):
            refusal = await self._counts.admit(principal, self._seconds_per_request())
            if refusal is not None:
                raise refused(QuotaExceeded(*refusal), self._metrics)
            self.held[principal] += 1

    def release(self, principal: str) -> None:
        """As `QuotaKeeper`."""
        if self._is_limited(principal):
            self.held[principal] -= 1
            self._counts.release(principal)

    def charge(self, principal: str, requests: int) -> None:
        """As `QuotaKeeper`."""
        if requests and self._is_limited(principal):
            self._counts.charge(principal, requests)

    def _is_limited(self, principal: str) -> bool:
        key = self._auth.keys.get(principal)
        own = key is not None and (key.max_concurrent or key.requests_per_minute)
        return bool(own or self._auth.max_concurrent or self._auth.requests_per_minute)
