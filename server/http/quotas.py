"""Quotas per API key: concurrent requests, and requests per minute. Every method counts, and each choice of each prompt.

Promises that a request beyond its key's quota is refused before its body is read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.http.errors import APIError
from outrider.server.settings import Auth
from outrider.server.telemetry.metrics import Metrics

# A key's quota is used up: the reason, one of outrider.server.telemetry.metrics.REFUSALS, a message, and seconds to wait.
Refusal = tuple[str, str, float]


class QuotaKeeper(Protocol):
    """Counts requests by principal."""

    async def admit(self, principal: str) -> None:
        """Counts one HTTP request, which runs until `release`. Raises APIError if the quota is used up."""

    async def release(self, principal: str) -> None:
        """Records that an admitted request has ended, so that another one is admitted after it."""

    def charge(self, principal: str, requests: int) -> None:
        """Counts further requests of an HTTP request that is admitted. Later ones wait until the allowance covers them."""


@dataclass
class Usage:
    concurrent: int = 0  # HTTP requests that have not been answered completely
    allowance: float = 0.0  # requests that may arrive now: the token bucket's level; negative after many choices
    updated_at: float = 0.0  # the clock's time at the last update of `allowance`


class Quotas:
    """Counts requests by principal, and refuses those beyond the quota."""

    def __init__(
        self,
        auth: Auth,
        metrics: Metrics,
        seconds_per_request: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds_per_request` estimates when a running request ends."""
        self._auth = auth
        self._metrics = metrics
        self._seconds_per_request = seconds_per_request
        self._clock = clock
        self._usage: dict[str, Usage] = {}

    async def admit(self, principal: str) -> None:
        """See `QuotaKeeper`."""
        if (refusal := self.enter(principal, self._seconds_per_request())) is not None:
            raise refused(refusal, self._metrics)

    def enter(self, principal: str, seconds_per_request: float) -> Refusal | None:
        """Counts one request, which runs until `release`; None unless it is refused."""
        key = self._auth.keys.get(principal)
        max_concurrent = (key and key.max_concurrent) or self._auth.concurrent_limit
        usage, per_minute = self._refill(principal)
        if max_concurrent is not None and usage.concurrent >= max_concurrent:
            message = f"This key may have {max_concurrent} requests at once; wait for one of them to end."
            return "concurrency", message, seconds_per_request
        if per_minute is not None and usage.allowance < 1:
            message = f"This key may send {per_minute} requests a minute; retry later."
            return "rate", message, (1 - usage.allowance) * 60 / per_minute
        usage.allowance -= 1
        usage.concurrent += 1
        return None

    async def release(self, principal: str) -> None:
        """See `QuotaKeeper`."""
        self.adopt(principal, -1)

    def adopt(self, principal: str, requests: int) -> None:
        """Changes the number of concurrent requests by those that were counted elsewhere."""
        self._refill(principal)[0].concurrent += requests

    def charge(self, principal: str, requests: int) -> None:
        """See `QuotaKeeper`."""
        usage, _ = self._refill(principal)
        usage.allowance -= requests

    def _refill(self, principal: str) -> tuple[Usage, int | None]:
        """The principal's usage, with a token bucket that refills within a minute, and the requests allowed per minute."""
        key, now = self._auth.keys.get(principal), self._clock()
        per_minute = (key and key.requests_per_minute) or self._auth.requests_per_minute
        usage = self._usage.setdefault(principal, Usage(allowance=per_minute or 0, updated_at=now))
        if per_minute is not None:
            usage.allowance = min(per_minute, usage.allowance + (now - usage.updated_at) * per_minute / 60)
        usage.updated_at = now
        return usage, per_minute


def refused(refusal: Refusal, metrics: Metrics) -> APIError:
    """Counts a refusal, and returns its response."""
    reason, message, seconds = refusal
    metrics.rejected_requests.labels(reason).inc()
    return APIError(429, message, code="rate_limit_exceeded", retry_seconds=seconds)


class HoldQuota:
    """ASGI middleware: holds the principal's quota from before the body is read until just before the answer's end is sent.

    So a client that has read an answer to its end can send its next request at once. Raises APIError if the quota is used up.
    """

    def __init__(self, app: ASGIApp, quotas: QuotaKeeper) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = scope.get("state", {}).get("principal")
        if principal is None or scope["type"] != "http":
            return await self._app(scope, receive, send)
        await self._quotas.admit(principal)
        held = True

        async def release() -> None:
            nonlocal held
            if held:
                held = False
                await self._quotas.release(principal)

        async def send_or_end(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await release()
            await send(message)

        try:
            await self._app(scope, receive, send_or_end)
        finally:
            await release()
