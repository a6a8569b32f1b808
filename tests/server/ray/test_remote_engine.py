"""The ingress's engine over fake replicas: what is lost with a replica, what is sent again, and how requests end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from outrider.server.engine.engine import WorkerLost
from outrider.server.engine.messages import Accepted, Request, TokenEvent
from outrider.server.ray import remote_engine, wire
from outrider.server.ray.remote_engine import RemoteEngine, ReplicaLost
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.sampling_params import SamplingParams
from tests.server.engine.rig import READY, written

Item = bytes | Exception | None  # None waits for ever


def event(text: str, last: bool = False) -> bytes:
    return wire.encode_batch([TokenEvent("a", [1], text, "stop" if last else None)])


class FakeReplicas:
    """Plays one script per attempt."""

    def __init__(self, *scripts: list[Item]) -> None:
        self.scripts = list(scripts)
        self.calls: list[tuple[str, wire.Call]] = []
        self.forgotten: list[str] = []
        self.closed = 0
        self.unreachable = 0  # attempts to describe a replica that fail

    async def describe(self) -> bytes:
        if self.unreachable:
            self.unreachable -= 1
            raise ReplicaLost
        return wire.encode(READY)

    async def generate(self, affinity: str, call: bytes) -> AsyncGenerator[bytes, None]:
        self.calls.append((affinity, wire.decode_call(call)))
        try:
            for item in self.scripts.pop(0):
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    await asyncio.Event().wait()
                else:
                    yield item
        finally:
            self.closed += 1

    def forget(self, affinity: str, call: bytes) -> None:
        self.forgotten.append(affinity)


def request(**fields: Any) -> Request:
    return Request("a", [1, 2], SamplingParams(), 5, affinity="conversation", **fields)


@asynccontextmanager
async def running(replicas: FakeReplicas) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(load_settings(), Metrics(), replicas)
    await engine.start(lambda _: None)
    assert await engine.wait_started() == READY
    yield engine
    await engine.stop()


async def texts(engine: RemoteEngine, admitted: bool = False) -> list[str]:
    return [written(each) async for each in engine.generate(request(), admitted=admitted)]


async def test_a_request_goes_where_its_conversation_is() -> None:
    replicas = FakeReplicas([event("a"), event("b", last=True)])
    async with running(replicas) as engine:
        assert engine.ready and engine.state == "ready"
        assert await texts(engine) == ["a", "b"]
        engine.forget(request(session="s"))
        engine.forget(request())
    [(affinity, call)] = replicas.calls
    assert (affinity, call.request, call.admitted) == ("conversation", request(), False)
    assert call.age_seconds >= 0
    assert replicas.forgotten == ["conversation"]


async def test_a_replica_that_is_lost_before_its_first_token_is_replaced() -> None:
    accepted = wire.encode_batch([Accepted("a")])
    replicas = FakeReplicas([ReplicaLost()], [accepted, ReplicaLost()], [accepted, event("a", last=True)])
    async with running(replicas) as engine:
        assert await texts(engine) == ["+", "+", "a"]
    assert [call.admitted for _, call in replicas.calls] == [False, True, True]  # it keeps its place


@pytest.mark.parametrize("script", [[event("a"), ReplicaLost()], [event("a")]])
async def test_an_answer_that_has_begun_is_lost_with_its_replica(script: list[Item]) -> None:
    replicas = FakeReplicas(script)
    async with running(replicas) as engine:
        with pytest.raises(WorkerLost, match="try again shortly"):
            await texts(engine)
    assert len(replicas.calls) == 1


async def test_an_idle_stream_is_kept_alive_and_its_end_cancels_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "KEEP_ALIVE_SECONDS", 0.001)
    replicas = FakeReplicas([event("a"), None])
    async with running(replicas) as engine:
        async with aclosing(engine.generate(request())) as events:
            found = [await anext(events) for _ in range(3)]
        assert [getattr(each, "text", None) for each in found] == ["a", None, None]
        assert replicas.closed == 1
