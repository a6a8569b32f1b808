"""The deployments of a Ray cluster, as the ingress calls them: Ray's errors become this project's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from outrider.server.ray.coordinator import REPORT_SECONDS
from outrider.server.ray.remote_engine import RETRY_SECONDS, ReplicaLost, ReplicasFull
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

    async def admit(self, principal: str, seconds_per_request: float) -> tuple[str, str, float] | None:
        """Waits for another coordinator if this one is lost."""
        while True:
            try:
                refusal: tuple[str, str, float] | None
                refusal = await self._handle.admit.remote(self._member, principal, seconds_per_request)
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
