"""The ingress: the HTTP application of one machine's server, on the engine, the quotas and the metrics of a cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI

from outrider.server.app import create_app
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.engine.interface import EngineLike
from outrider.server.engine.messages import StepReport
from outrider.server.ray.remote_engine import RemoteEngine, Replicas
from outrider.server.ray.shared_quotas import SharedCounts, SharedQuotas
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics


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
        new_engine=partial(new_engine, replicas),
        new_quotas=new_quotas,
        metrics=IngressMetrics(coarse=settings.server.coalesce_ms > 0),
        read_metrics=read_metrics,
    )
    return app, made[0]


def new_engine(replicas: Replicas, settings: Settings, metrics: Metrics) -> RemoteEngine:
    """The engine of an ingress."""
    return RemoteEngine(settings, metrics, replicas)
