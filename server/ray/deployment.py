"""The Ray Serve application: an ingress deployment, a deployment of model replicas, and one coordinator.

`application` makes it from the settings; `build` from the arguments of a Serve config file (see docker/ray.yml). What
the ingress calls raises this project's errors instead of Ray's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from outrider.server.http.quotas import Refusal
from outrider.server.imports import hide_torch
from outrider.server.ray.coordinator import REPORT_SECONDS, Coordinator
from outrider.server.ray.remote_engine import RETRY_SECONDS, ReplicaLost, ReplicasFull
from outrider.server.ray.replica import ModelReplica
from outrider.server.ray.scale import Scale
from outrider.server.settings import Auth, Settings, SettingsError, load_settings
from outrider.server.settings.tree import encode_settings
from outrider.server.telemetry.logs import configure
from outrider.server.telemetry.metrics import Metrics

LOST = (RayActorError, NodeDiedError, ObjectLostError, DeploymentUnavailableError, ReplicaUnavailableError)


class ServeReplicas:
    """The model replicas behind a Serve handle. See `remote_engine.Replicas`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def describe(self) -> bytes:
        """Calls any replica."""
        try:
            answer: bytes = await self._handle.describe.remote()
        except LOST as error:
            raise ReplicaLost from error
        return answer

    async def generate(self, affinity: str, call: bytes) -> AsyncGenerator[bytes, None]:
        """Streams from the replica that consistent hashing of `affinity` selects, or from its neighbour if that is full."""
        response = self._streaming.options(session_id=affinity).generate.remote(call)
        try:
            async for batch in response:
                yield batch
        except BackPressureError as error:
            raise ReplicasFull from error
        except LOST as error:
            raise ReplicaLost from error
        finally:
            response.cancel()

    def forget(self, affinity: str, call: bytes) -> None:
        """Returns at once."""
        self._handle.options(session_id=affinity).forget.remote(call)


class ServeCoordinator:
    """The coordinator behind a Serve handle, as one member calls it. See `shared_quotas.SharedCounts`."""

    def __init__(self, handle: DeploymentHandle[Any], member: str) -> None:
        self._handle = handle
        self._member = member

    async def admit(self, principal: str, seconds_per_request: float) -> Refusal | None:
        """Waits for another coordinator if this one is lost."""
        while True:
            try:
                refusal: Refusal | None = await self._handle.admit.remote(self._member, principal, seconds_per_request)
                return refusal
            except LOST:
                await asyncio.sleep(RETRY_SECONDS)

    async def release(self, principal: str) -> None:
        """Returns when the coordinator knows it, or is lost: the members' reports tell the next one."""
        with suppress(*LOST):
            await self._handle.release.remote(self._member, principal)

    def charge(self, principal: str, requests: int) -> None:
        """Returns at once."""
        self._handle.charge.remote(principal, requests)

    async def page(self) -> bytes:
        """The metrics of all members."""
        page: bytes = await self._handle.page.remote()
        return page

    async def report(self, metrics: Metrics, held: Mapping[str, int] = MappingProxyType({})) -> None:
        """Reports the member's metrics, and how many requests of each principal it runs, until it is cancelled."""
        while True:
            with suppress(*LOST):
                await self._handle.report.remote(self._member, metrics.render(), dict(held))
            await asyncio.sleep(REPORT_SECONDS)


ROUTER = "outrider.server.ray.router.AffinityRouter"
# After a full replica, this many others are tried.
NEIGHBOURS = 2
COORDINATOR_CALLS = 10_000
# The ingress logs its requests itself.
NO_ACCESS_LOG = {"enable_access_log": False}
# Each ingress answers at most this many HTTP requests at once.
INGRESS_CALLS = 1024


class Replica(ModelReplica):
    async def __init__(self, settings: dict[str, Any], coordinator: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        super().__init__(settings)
        await self.start()
        self._reports = asyncio.create_task(ServeCoordinator(coordinator, replica_name()).report(self.metrics))

    async def __del__(self) -> None:
        self._reports.cancel()
        await self.stop()


class Ingress:
    async def __init__(  # type: ignore[misc]
        self, settings: Settings, replicas: DeploymentHandle[Any], coordinator: DeploymentHandle[Any]
    ) -> None:
        configure(settings.logging)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if not settings.model.trust_remote_code:
            hide_torch()
        from outrider.server.ray.ingress import create_ingress  # imports transformers

        member = ServeCoordinator(coordinator, f"ingress-{replica_name()}")
        self._app, quotas = create_ingress(settings, ServeReplicas(replicas), member, member.page)
        self._reports = asyncio.create_task(member.report(self._app.state.metrics, quotas.held))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def replica_name() -> str:
    """The name of this process among those of its deployment."""
    return str(serve.get_replica_context().replica_id.unique_id)


def application(settings: Settings, scale: Scale) -> Application:
    """The application. Raises SettingsError if a setting does not work on a cluster."""
    if settings.metrics.port is not None:
        raise SettingsError(
            "metrics.port does not work on a Ray cluster, whose ingress serves /metrics; set metrics.key instead."
        )
    quotas = Auth.model_validate(settings.auth.model_dump(mode="json") | {"file": None})  # of each principal, without its key
    coordinator = serve.deployment(
        Coordinator,
        name="coordinator",
        max_ongoing_requests=COORDINATOR_CALLS,
        ray_actor_options={"num_cpus": 0},
        logging_config=NO_ACCESS_LOG,
    ).bind(quotas)
    replicas = replica_deployment(settings, scale).bind(encode_settings(settings), coordinator)
    return ingress_deployment(settings, scale).bind(settings, replicas, coordinator)


def ingress_deployment(settings: Settings, scale: Scale) -> Any:
    """The deployment of the ingresses, not yet bound to its arguments."""
    # Stored responses are in the ingress that made them; a client with the header `x-session-id` returns to it.
    several: dict[str, Any] = {"request_router_config": RequestRouterConfig(request_router_class=ROUTER)}
    return serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=scale.ingress_replicas,
        max_ongoing_requests=INGRESS_CALLS,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
        ray_actor_options={"num_cpus": scale.ingress_cpus},
        logging_config=NO_ACCESS_LOG,
        **(several if scale.ingress_replicas > 1 else {}),
    )


def replica_deployment(settings: Settings, scale: Scale) -> Any:
    """The deployment of the model replicas, not yet bound to its arguments."""
    active = settings.scheduling.most_active
    count: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.max_replicas is not None:
        bounds = {"min_replicas": scale.replicas, "max_replicas": scale.max_replicas}
        count = {"autoscaling_config": AutoscalingConfig(**bounds, target_ongoing_requests=active)}
    return serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=2 * active,  # one half runs, the other waits; further ones go to a neighbour
        max_queued_requests=max(1, settings.scheduling.max_waiting),
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": NEIGHBOURS}
        ),
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        logging_config=NO_ACCESS_LOG,
        **count,
    )


def build(arguments: dict[str, Any]) -> Application:
    """The application of a Serve config file: `config` is a settings file on the nodes, the rest are fields of `Scale`."""
    config = arguments.get("config")
    scale = Scale.model_validate({name: value for name, value in arguments.items() if name != "config"})
    settings = load_settings(Path(config) if config else None)
    if not (settings.auth.keys or settings.auth.open):  # Ray's proxy listens where the Serve config file says
        raise SettingsError("A cluster needs API keys; set auth.keys or auth.file, or auth.open if others control access.")
    return application(settings, scale)
