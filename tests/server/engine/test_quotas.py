"""Quotas per API key: concurrent requests, and requests per minute."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from server.engine.queue import QueueFull
from server.engine.quotas import Quotas
from server.settings import load_settings


def quotas(clock: list[float], **auth: object) -> Quotas:
    return Quotas(load_settings(None, {"auth": auth}).auth, lambda: clock[0])


def test_concurrent_requests_are_limited() -> None:
    limits = quotas([0.0], max_concurrent=2, keys={"busy": {"key": "long-enough", "max_concurrent": 1}})
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(limits.hold("anyone", 3.0))
        with pytest.raises(QueueFull, match="2 requests at once") as raised:
            held.enter_context(limits.hold("anyone", 3.0))
        assert (raised.value.reason, raised.value.seconds) == ("concurrency", 3.0)
        with limits.hold("busy", 1.0), pytest.raises(QueueFull, match="1 requests at once"):
            held.enter_context(limits.hold("busy", 1.0))
        held.enter_context(limits.hold("busy", 1.0))  # the first request has ended
    with limits.hold("anyone", 1.0):
        pass


def test_requests_per_minute_are_limited() -> None:
    clock = [100.0]
    limits = quotas(clock, requests_per_minute=6)

    def spend(principal: str = "anyone") -> None:
        with limits.hold(principal, 1.0):
            pass

    for _ in range(6):
        spend()
    with pytest.raises(QueueFull, match="6 requests a minute") as raised:
        spend()
    assert raised.value.reason == "rate"
    assert raised.value.seconds == pytest.approx(10.0)
    spend("another")
    clock[0] += 10.0
    spend()
    with pytest.raises(QueueFull):
        spend()
    clock[0] += 3600.0
    for _ in range(6):
        spend()
    with pytest.raises(QueueFull):
        spend()
