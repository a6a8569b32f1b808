"""API keys: authentication, and ownership of datastores and sessions."""

import asyncio
import json
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.fair_threads import ANYONE
from outrider.server.http.auth import OPEN_PATHS, Authenticator
from outrider.server.http.errors import APIError
from outrider.server.settings import SettingsError, load_settings
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
    for path in ("/v1/completions", "/tokenize", "/openapi.json", "/anything", "/health/"):
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
        ("/v1/models", "Bearer wrong", False),
        ("/v1/models", "", False),
        ("/health", "", False),
        ("/health", f"Bearer {ALICE}", False),
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


def test_a_session_belongs_to_its_key(guarded: Served) -> None:
    fields = {"model": guarded.model, "prompt": PECULIAR, "max_tokens": 4, "session_id": "shared-name"}
    cached = []
    for key in (ALICE, BOB, ALICE):
        answer = guarded.http.post("/v1/completions", json=fields, headers={"Authorization": f"Bearer {key}"}).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
