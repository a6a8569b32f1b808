"""API keys: authentication, ownership of datastores and sessions, and quotas."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.fair_threads import ANYONE
from outrider.server.http.auth import OPEN_PATHS, Authenticator
from outrider.server.http.errors import APIError
from outrider.server.http.quotas import HoldQuota, Quotas
from outrider.server.settings import SettingsError, load_settings
from outrider.server.telemetry.metrics import Metrics
from tests.server.fakes import FakeEngine, app_with, fetch
from tests.servers import ALICE, BOB, PECULIAR, Served


async def principal_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the principal, without reading the body."""
    await PlainTextResponse(scope.get("state", {}).get("principal", "nobody"))(scope, receive, send)


def authenticator(app: ASGIApp = principal_app, **keys: str) -> Authenticator:
    return Authenticator(app, load_settings(None, {"auth.keys": keys}).auth.keys)


def send_head(app: ASGIApp, path: str, *headers: tuple[bytes, bytes], method: str = "POST") -> list[Message]:
    """The response to a request whose body never arrives."""
    sent: list[Message] = []

    async def receive() -> Message:
        pytest.fail("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    asyncio.run(cast(Coroutine[None, None, None], app(scope, receive, send)))
    return sent


def test_a_request_without_a_key_is_refused_before_a_byte_of_its_body_is_read() -> None:
    spelled = ("//v1/models", "/v1/models/", "/health/../v1/models", "/V1/models", "/v1/models\0", "/v1;/models")
    for path in ("/v1/completions", "/tokenize", "/openapi.json", "/anything", "/health/", *spelled):
        start, body = send_head(authenticator(alice=ALICE), path, (b"content-length", b"8000000"))
        assert (start["status"], json.loads(body["body"])["error"]["code"]) == (401, "missing_api_key")
        assert (b"connection", b"close") in start["headers"]


def test_the_principal_is_set_and_status_routes_need_no_key() -> None:
    guarded = authenticator(alice=ALICE, bob=BOB)
    assert send_head(guarded, "/v1/models", (b"authorization", f"Bearer {BOB}".encode()))[1]["body"] == b"bob"
    assert send_head(authenticator(), "/v1/models")[1]["body"] == ANYONE.encode()
    for path in (*OPEN_PATHS, "/page/x.js"):
        for method in ("GET", "HEAD"):
            assert send_head(guarded, path, method=method)[0]["status"] == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert send_head(guarded, path, method=method)[0]["status"] == 401


@pytest.mark.parametrize(
    ("path", "key", "known"),
    [
        ("/v1/models", f"Bearer {ALICE}", True),
        *(("/v1/models", key, False) for key in ("Bearer wrong", "")),
        *(("/health", key, False) for key in (f"Bearer {ALICE}", "")),
    ],
)
def test_only_a_known_client_names_its_request(path: str, key: str, known: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "outrider.requests")
    app = app_with(FakeEngine("a"), auth__keys={"alice": ALICE})
    for requested, accepted in (("my-id_7.x", True), ("a b", False), ("x" * 129, False), ("<script>", False), ("", False)):
        caplog.clear()
        found = fetch(app, "GET", path, headers={"x-request-id": requested, "Authorization": key}).headers["x-request-id"]
        assert (found == requested) is (accepted and known) and (found == requested or found.startswith("req_"))
        (logged,) = [record.__dict__["fields"] for record in caplog.records if record.name == "outrider.requests"]
        assert logged["request_id"] == found


def test_a_key_names_its_principal() -> None:
    authenticate = authenticator(alice=ALICE, bob=BOB)
    assert authenticate.principal(f"Bearer {ALICE}") == "alice"
    assert authenticate.principal(f"bearer  {BOB} ") == "bob"
    assert authenticate.principal(None, f" {ALICE} ") == "alice"
    assert authenticate.principal(f"Bearer {BOB}", ALICE) == "bob"
    assert authenticator().principal(None) == ANYONE


@pytest.mark.parametrize("header", [None, "", ALICE, "Bearer", "Bearer  ", f"Basic {ALICE}", f"Bearer {ALICE}x", "Bearer \xff"])
def test_missing_and_wrong_keys_are_a_401(header: str | None) -> None:
    with pytest.raises(APIError) as raised:
        authenticator(alice=ALICE).principal(header)
    assert raised.value.status_code == 401
    assert ALICE not in raised.value.message


def test_keys_are_read_from_settings_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"alice: {ALICE}\nbob: {{key: {BOB}, datastores: [a, b]}}\n")
    auth = load_settings(None, {"auth.file": str(file), "auth.keys": {"carol": "carols-secret"}}).auth
    assert set(auth.keys) == {"alice", "bob", "carol"}
    assert auth.keys["bob"].datastores == ("a", "b")
    assert ALICE not in repr(auth)
    file.write_text("alice: short")
    for flags in ({"auth.file": str(file)}, {"auth.keys": {"alice": "short"}}):
        with pytest.raises(SettingsError, match="alice") as raised:
            load_settings(None, flags)
        assert "short" not in str(raised.value).removeprefix(str(file)).replace("too_short", "")


def drafted(server: Served, key: str, prompt: str = PECULIAR[: PECULIAR.index(",")]) -> int:
    """How many tokens a datastore drafts in the first step; the second and last step drafts none."""
    fields = {"model": server.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    body = {**fields, "speculation": {"drafter": "retrieval", "report": True}}
    answer = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["speculation"]["drafted_tokens"].get("retrieval", 0))


def test_a_datastore_belongs_to_its_key(guarded: Served) -> None:
    assert drafted(guarded, ALICE) > 0
    assert drafted(guarded, BOB) == 0


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
