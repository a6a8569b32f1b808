"""Quotas per API key: concurrent requests, and requests per minute."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from outrider.server.http.errors import APIError
from outrider.server.http.quotas import HoldQuota, Quotas
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics


def quotas(clock: Callable[[], float] = lambda: 0.0, metrics: Metrics | None = None, **auth: object) -> Quotas:
    return Quotas(load_settings(None, {"auth": auth}).auth, metrics or Metrics(), lambda: 3.0, clock)


def scope(path: str, method: str = "POST") -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": [], "state": {"principal": "anyone"}}


async def no_body() -> Any:
    raise AssertionError("the body is read")


@contextmanager
def hold(limits: Quotas, principal: str) -> Iterator[None]:
    """A request that runs while the context is open."""
    asyncio.run(limits.admit(principal))
    yield
    asyncio.run(limits.release(principal))


def spend(limits: Quotas, principal: str = "anyone") -> None:
    """Makes one request."""
    with hold(limits, principal):
        pass


def test_concurrent_requests_are_limited() -> None:
    metrics = Metrics()
    limits = quotas(metrics=metrics, max_concurrent=2, keys={"busy": {"key": "long-enough", "max_concurrent": 1}})
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(hold(limits, "anyone"))
        with pytest.raises(APIError, match="2 requests at once") as raised:
            held.enter_context(hold(limits, "anyone"))
        assert (raised.value.status_code, raised.value.code, raised.value.retry_seconds) == (429, "rate_limit_exceeded", 3.0)
        with hold(limits, "busy"), pytest.raises(APIError, match="1 requests at once"):
            held.enter_context(hold(limits, "busy"))
        held.enter_context(hold(limits, "busy"))  # the first request has ended
    spend(limits)
    assert 'outrider_rejected_requests_total{reason="concurrency"} 2.0' in metrics.render().decode()


def test_requests_per_minute_are_limited() -> None:
    now = [100.0]
    limits = quotas(lambda: now[0], requests_per_minute=6)
    for _ in range(6):
        spend(limits)
    with pytest.raises(APIError, match="6 requests a minute") as raised:
        spend(limits)
    assert raised.value.retry_seconds == pytest.approx(10.0)
    spend(limits, "another")
    now[0] += 10.0
    spend(limits)
    with pytest.raises(APIError):
        spend(limits)
    now[0] += 3600.0
    for _ in range(6):
        spend(limits)
    with pytest.raises(APIError):
        spend(limits)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
async def test_a_quota_is_held_while_the_request_is_answered_and_no_body_is_read_without_one(method: str) -> None:
    answering: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answering.append(scope["path"])
        await asyncio.sleep(0.01)
        answering.remove(scope["path"])

    middleware = HoldQuota(app, quotas(max_concurrent=1))

    async def send(message: Any) -> None:
        raise AssertionError("an answer is sent")

    first = asyncio.ensure_future(middleware(scope("/first"), no_body, send))
    await asyncio.sleep(0)
    with pytest.raises(APIError, match="1 requests at once"):
        await middleware(scope("/second", method), no_body, send)
    assert answering == ["/first"]
    await first
    await middleware(scope("/fourth"), no_body, send)
    assert not answering


async def test_who_has_read_an_answer_to_its_end_may_send_the_next_request() -> None:
    admitted: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        admitted.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    middleware = HoldQuota(app, quotas(max_concurrent=1))

    async def ignore(message: Any) -> None:
        pass

    async def send(message: Any) -> None:
        if message.get("body") == b"begun":
            with pytest.raises(APIError):
                await middleware(scope("/early"), no_body, ignore)
        elif message["type"] == "http.response.body":
            await middleware(scope("/next"), no_body, ignore)

    await middleware(scope("/first"), no_body, send)
    await middleware(scope("/last"), no_body, ignore)  # the first one was released once
    assert admitted == ["/first", "/next", "/last"]


def test_many_choices_use_up_the_rate() -> None:
    now = [100.0]
    limits = quotas(lambda: now[0], requests_per_minute=6)
    with hold(limits, "anyone"):
        limits.charge("anyone", 11)
    now[0] += 60.0
    with pytest.raises(APIError) as raised:
        spend(limits)
    assert raised.value.retry_seconds == pytest.approx(10.0)
    now[0] += 10.0
    spend(limits)
