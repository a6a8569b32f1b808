"""A model that sleeps: an engine without a worker, and a replica with this engine.

It decodes up to `scheduling.max_active` requests at once. Its time per step is in the environment, which reaches every
process of a cluster. A request is cached if the replica has seen its conversation before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable

from outrider.server.engine.messages import Ready, Request, StepReport, TokenEvent
from outrider.server.ray.deployment import Replica
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics

STEP = "BENCH_STEP_SECONDS"
STEP_TOKENS = 4  # which are one event of a stream
PREFILL_SECONDS = 0.02  # to the first token
READY = Ready(
    1 << 17,
    "none",
    "none",
    0.0,
    weight_bits=0.0,
    kv_dtype="none",
    slots=4,
    max_active=4,
    slot_bytes=0,
    invariance="exact: nothing is computed",
)


class SleepingEngine:
    """See `EngineLike`."""

    info: Ready | None = READY
    ready, state, failure, seconds_per_request = True, "ready", None, 1.0
    shares_files = False

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._slots = asyncio.Semaphore(settings.scheduling.most_active)
        self._step_seconds = float(os.environ[STEP])
        self._seen: set[str] = set()

    async def start(self, on_failure: Callable[[str], None]) -> None: ...

    async def stop(self) -> None: ...

    async def wait_started(self) -> Ready:
        return READY

    async def generate(
        self, request: Request, arrived: float | None = None, admitted: bool = False
    ) -> AsyncGenerator[TokenEvent | None, None]:
        """Events of as many tokens as a step has, until the answer is complete."""
        async with self._slots:
            cached = len(request.prompt) if request.affinity in self._seen else 0
            self._seen.add(request.affinity)
            await asyncio.sleep(PREFILL_SECONDS)
            for start in range(0, request.max_tokens, STEP_TOKENS):
                if start:
                    await asyncio.sleep(self._step_seconds)
                count = min(STEP_TOKENS, request.max_tokens - start)
                last = start + count == request.max_tokens
                step = StepReport(0.0, self._step_seconds, 0.0, {}, {})
                yield TokenEvent(request.id, [100] * count, " word" * count, "length" if last else None, step, cached)
                cached = 0

    def forget(self, request: Request) -> None: ...


class SleepingReplica(Replica):
    """A replica with this engine."""

    def new_engine(self, settings: Settings) -> SleepingEngine:
        """Ignores everything but the number of requests at once."""
        return SleepingEngine(settings, self.metrics)
