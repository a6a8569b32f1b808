"""Quotas across ingresses, and one metrics page of all members."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outrider.server.ray.coordinator import REPORT_SECONDS, SILENT_SECONDS, Coordinator
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics


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
