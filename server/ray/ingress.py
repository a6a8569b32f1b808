"""The ingress: the HTTP application of one machine's server, on the engine, the quotas and the metrics of a cluster."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol

from fastapi import FastAPI

from outrider.server.app import create_app
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.engine.interface import EngineLike
from outrider.server.engine.messages import StepReport
from outrider.server.http.quotas import Refusal, refused
from outrider.server.ray.remote_engine import RemoteEngine, Replicas
from outrider.server.settings import Auth, Settings
from outrider.server.telemetry.metrics import Metrics

RELEASE_SECONDS = 1.0


class SharedCounts(Protocol):
    """The coordinator, as an ingress calls it."""

    async def admit(self, principal: str, seconds_per_request: float) -> Refusal | None:
        """Counts a request, unless the quota is used up."""

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
            refusal: Refusal | None = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda asked: self._give_back(principal, asked))
            raise
        except Exception:
            self.held[principal] -= 1
            raise
        if refusal is not None:
            self.held[principal] -= 1
            raise refused(refusal, self._metrics)

    def _call(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a call outside of the request's context: Ray cancels what a cancelled request has called."""
        task = asyncio.get_running_loop().create_task(call, context=Context())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _give_back(self, principal: str, asked: asyncio.Task[Refusal | None]) -> None:
        """Ends a request that nobody waits for, once the coordinator has counted it or not."""
        self.held[principal] -= 1
        if not asked.cancelled() and asked.exception() is None and asked.result() is None:
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


class IngressMetrics(Metrics):
    """The metrics of an ingress. Those of workers are the replicas', which also count their own steps."""

    def __init__(self, coarse: bool) -> None:
        super().__init__(coarse)
        gauges = (self.worker_ready, self.last_progress, self.running, self.waiting, self.sessions, self.kv_cache_usage)
        for gauge in gauges:  # at zero they would look like a worker that does not run
            self.registry.unregister(gauge)

    def record_step(self, step: StepReport, tokens: int) -> None:
        """Counts nothing."""


def create_ingress(
    settings: Settings, replicas: Replicas, counts: SharedCounts, read_metrics: Callable[[], Awaitable[bytes]]
) -> tuple[FastAPI, SharedQuotas]:
    """The application, and its quotas. Raises ModelError if the tokenizer cannot be loaded."""
    made: list[SharedQuotas] = []

    def new_quotas(settings: Settings, metrics: Metrics, engine: EngineLike) -> SharedQuotas:
        made.append(SharedQuotas(settings.auth, metrics, counts, lambda: engine.seconds_per_request))
        return made[0]

    app = create_app(
        settings,
        load_tried_tokenizer(settings),
        new_engine=lambda settings, metrics: RemoteEngine(settings, metrics, replicas),
        new_quotas=new_quotas,
        metrics=IngressMetrics(coarse=settings.server.coalesce_ms > 0),
        read_metrics=read_metrics,
    )
    return app, made[0]
