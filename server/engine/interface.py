"""The interface of an engine, on this machine or in front of a cluster's replicas."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from outrider.server.engine.messages import Event, Ready, Request


class EngineLike(Protocol):
    """Answers requests. Call `start`, then `generate` for each request, then `stop`."""

    @property
    def shares_files(self) -> bool:
        """Whether the workers read the files of this machine."""

    @property
    def info(self) -> Ready | None:
        """Properties of a worker that is or was ready."""

    @property
    def ready(self) -> bool:
        """Whether requests are served."""

    @property
    def failure(self) -> str | None:
        """Why requests are refused, one sentence."""

    @property
    def state(self) -> str:
        """ready, loading, restarting, draining or failed."""

    @property
    def seconds_per_request(self) -> float:
        """The mean time of a request."""

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """Starts and returns. Calls `on_failure` if no worker can run."""

    async def stop(self) -> None:
        """Ends what `start` has started."""

    async def wait_started(self) -> Ready:
        """Waits for the first worker. Raises EngineError if none can run."""

    def generate(
        self, request: Request, arrived: float | None = None, admitted: bool = False
    ) -> AsyncGenerator[Event | None, None]:
        """The events of a request, from the worker's `Accepted` on; None after each keep-alive interval without an event.

        Raises EngineError.
        """

    def forget(self, request: Request) -> None:
        """Drops the session of a request that has ended."""
