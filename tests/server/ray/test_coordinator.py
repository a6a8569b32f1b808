"""Quotas across ingresses, one metrics page of all members, and the ingress's engine over fake replicas."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.engine.engine import WorkerLost
from outrider.server.engine.messages import Accepted, Request, TokenEvent
from outrider.server.ray import remote_engine, wire
from outrider.server.ray.coordinator import REPORT_SECONDS, SILENT_SECONDS, Coordinator
from outrider.server.ray.ingress import SharedQuotas
from outrider.server.ray.remote_engine import RemoteEngine, ReplicaLost
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.sampling_params import SamplingParams
from tests.server.engine.rig import READY, written


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def coordinator(clock: Clock | None = None, **auth: Any) -> Coordinator:
    return Coordinator(load_settings(None, {"auth": auth}).auth, clock or Clock())


def admitted(members: Coordinator, member: str) -> bool:
    return asyncio.run(members.admit(member, "anyone", 3.0)) is None


def test_a_quota_is_that_of_all_ingresses_together() -> None:
    members = coordinator(max_concurrent=2)
    assert admitted(members, "one") and admitted(members, "two")
    refusal = asyncio.run(members.admit("one", "anyone", 3.0))
    assert refusal == ("concurrency", "This key may have 2 requests at once; wait for one of them to end.", 3.0)
    asyncio.run(members.release("two", "anyone"))
    assert admitted(members, "one")


def test_an_ingress_that_has_ended_holds_nothing() -> None:
    clock = Clock()
    members = coordinator(clock, max_concurrent=1)
    assert admitted(members, "ended") and not admitted(members, "other")
    clock.now += SILENT_SECONDS - REPORT_SECONDS
    asyncio.run(members.report("other", b"", {}))
    assert not admitted(members, "other")
    clock.now += 2 * REPORT_SECONDS
    asyncio.run(members.report("other", b"", {}))
    assert admitted(members, "other")
    asyncio.run(members.release("ended", "anyone"))  # too late
    assert not admitted(members, "other")


def test_the_page_has_the_samples_of_every_member_with_its_name() -> None:
    first, second = Metrics(), Metrics()
    first.record_answer("/v1/chat/completions", 200)
    second.time_to_first_token.observe(0.5)
    members = coordinator()
    asyncio.run(members.report("one", first.render(), {}))
    asyncio.run(members.report("two", second.render(), {}))
    page = asyncio.run(members.page()).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {sample.labels["replica"] for family in families.values() for sample in family.samples} == {"one", "two"}
    alone = {family.name: len(family.samples) for family in text_string_to_metric_families(first.render().decode())}
    other = {family.name: len(family.samples) for family in text_string_to_metric_families(second.render().decode())}
    assert {name: len(family.samples) for name, family in families.items()} == {
        name: alone.get(name, 0) + other.get(name, 0) for name in alone | other
    }
    counts = {
        s.labels["replica"]: s.value for s in families["outrider_time_to_first_token_seconds"].samples if "count" in s.name
    }
    assert counts == {"one": 0, "two": 1}


class FakeCounts:
    """Refuses everything after `free` requests."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.charged = 0

    async def admit(self, principal: str, seconds_per_request: float) -> tuple[str, str, float] | None:
        self.free -= 1
        return None if self.free >= 0 else ("concurrency", "Too many.", seconds_per_request)

    async def release(self, principal: str) -> None:
        self.free += 1

    def charge(self, principal: str, requests: int) -> None:
        self.charged += requests


class SlowCounts(FakeCounts):
    """Takes some turns of the event loop before and after it counts."""

    async def admit(self, principal: str, seconds_per_request: float) -> tuple[str, str, float] | None:
        await asyncio.sleep(0)
        refusal = await super().admit(principal, seconds_per_request)
        if refusal is not None:
            self.free += 1  # a refused request is not counted
        await asyncio.sleep(0)
        return refusal


@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize("turns", range(8))
async def test_a_client_that_hangs_up_at_any_moment_leaves_no_place(turns: int, free: int) -> None:
    counts = SlowCounts(free)
    auth = load_settings(None, {"auth.max_concurrent": 1}).auth
    quotas = SharedQuotas(auth, Metrics(), counts, lambda: 1.0)

    async def request() -> None:
        await quotas.admit("alice")
        try:
            await asyncio.sleep(0)
        finally:
            await quotas.release("alice")

    running = asyncio.create_task(request())
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (quotas.held["alice"], counts.free) == (0, free)


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
