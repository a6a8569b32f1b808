"""Which answers are bad."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.soak.attacks.answers import LOST, Answer, read

UNAVAILABLE = json.dumps({"error": {"message": "lost", "type": "service_unavailable_error", "code": LOST}})
BROKEN = json.dumps({"error": {"message": "see the log", "type": "server_error", "code": "internal_error"}})
WRONG = json.dumps({"error": {"message": "no", "type": "invalid_request_error", "code": "invalid_value"}})


def answer(status: int, text: str, **headers: str) -> Answer:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text, headers=headers))

    async def run() -> Answer:
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
            return await read(client, "POST", "/tokenize", content=b"{}")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "text", "bad"),
    [
        (200, "{}", False),
        (400, WRONG, False),
        (500, BROKEN, True),
        (503, UNAVAILABLE, False),
        (503, UNAVAILABLE.replace(LOST, "deadline_exceeded"), True),
        (200, f"data: {{}}\n\ndata: {BROKEN}\n\n", True),
        (200, f"data: {{}}\n\ndata: {UNAVAILABLE}\n\n", False),
        (400, "Traceback (most recent call last)", True),
        (200, "[" * 1500, False),
    ],
)
def test_server_errors_are_bad_except_for_a_lost_worker(status: int, text: str, bad: bool) -> None:
    assert (answer(status, text).fault(kills=True) is not None) == bad


def test_a_worker_that_nobody_killed_must_not_be_lost() -> None:
    assert "worker_unavailable" in (answer(503, UNAVAILABLE).fault(kills=False) or "")


def test_a_redirect_to_a_forged_host_is_bad() -> None:
    assert "evil" in (answer(307, "", location="http://evil.example/health").fault(kills=True) or "")
    assert answer(307, "", location="/health").fault(kills=True) is None


@pytest.mark.parametrize(("error", "bad"), [(httpx.ReadTimeout(""), True), (httpx.RemoteProtocolError(""), False)])
def test_a_request_that_hangs_is_bad(error: Exception, bad: bool) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    client = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(fail))
    assert (asyncio.run(read(client, "POST", "/")).fault(kills=True) is not None) == bad
