"""Foreign hosts and origins: refused by a server without keys, unless they are allowed."""

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.datastructures import Headers

from outrider.server.http.origins import OriginGuard
from outrider.server.settings import load_settings
from tests.server.fakes import FakeEngine, app_with, fetch

KEYS = {"alice": "a-key-of-some-length"}


def status(host: str, origin: str | None = None, **settings: Any) -> int:
    """The status of the error response; 200 if there is none."""
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    loaded = load_settings(None, flags)
    guard = OriginGuard(FastAPI(), loaded.server, has_keys=bool(loaded.auth.keys))
    error = guard.error(Headers({"host": host} | ({} if origin is None else {"origin": origin})))
    return 200 if error is None else error.status_code


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "x@localhost", "127.0.0.1.x", ""]
)
def test_a_rebound_host_name_is_refused(host: str) -> None:
    assert status(host) == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.0.2.7", "10.1.2.3:80"])
def test_addresses_and_localhost_are_allowed(host: str) -> None:
    assert status(host) == 200


def test_every_host_header_is_checked_and_none_is_needed() -> None:
    guard = OriginGuard(FastAPI(), load_settings(None, {}).server, has_keys=False)
    assert guard.error(Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])) is not None
    assert guard.error(Headers()) is None


def test_no_route_answers_a_foreign_host() -> None:
    app = app_with(FakeEngine("a"))
    for path in ("/v1/models", "/metrics", "/health", "/nothing"):
        answer = fetch(app, "GET", path, headers={"Host": "evil.example"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (421, "invalid_request_error", "host_not_allowed")
        assert "server.allowed_hosts" in error["message"] and "evil" not in answer.text
        assert answer.headers["connection"] == "close"


def test_with_keys_every_host_and_origin_is_allowed_by_default() -> None:
    assert status("api.example", "https://page.example", auth__keys=KEYS) == 200
    assert status("other", auth__keys=KEYS, server__allowed_hosts=["api.example"]) == 421


@pytest.mark.parametrize("origin", ["https://page.example", "null", "http://localhost:3000", "http://[::1", "http://", ""])
def test_a_foreign_origin_is_refused(origin: str) -> None:
    assert status("localhost:8000", origin) == 403


def test_a_page_cannot_post_text_without_a_preflight() -> None:
    headers = {"Origin": "https://page.example", "Content-Type": "text/plain"}
    engine = FakeEngine("a")
    answer = fetch(app_with(engine), "POST", "/v1/completions", {"prompt": "x"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "server.cors_origins" in answer.json()["error"]["message"]
    assert not engine.requests


def test_own_and_configured_origins_are_allowed() -> None:
    assert status("localhost:8000", "http://localhost:8000") == 200
    assert status("localhost:8000", "https://page.example", server__cors_origins=["https://page.example"]) == 200
    assert status("localhost:8000", "https://page.example", server__cors_origins=["*"]) == 200


def test_no_redirect_repeats_a_host() -> None:
    app = app_with(FakeEngine("a"), server__allowed_hosts=["*"])
    for path in ("/health/", "/v1/models/"):
        answer = fetch(app, "GET", path, headers={"Host": "evil.example"})
        assert answer.status_code == 404
        assert "location" not in answer.headers


LAN = "192.168.1.5:8000"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"referer": "http://evil.example/page"}, 403),
        ({"referer": "http://192.168.1.5:9000/"}, 403),
        ({"referer": "nonsense"}, 403),
        ({"referer": f"http://{LAN}/page/index.html"}, 200),
        ({"referer": "https://page.example/x"}, 200),
        ({"referer": "http://evil.example/", "sec-fetch-site": "same-origin"}, 200),  # of which no page can be the author
        ({}, 200),
    ],
)
def test_at_an_address_of_a_network_a_foreign_page_is_known_by_its_referer(headers: dict[str, str], expected: int) -> None:
    app = app_with(FakeEngine("a"), server__host="192.168.1.5", auth__open=True, server__cors_origins=["https://page.example"])
    sent = {"Host": LAN} | headers
    assert fetch(app, "GET", "/v1/models", headers=sent).status_code == expected
    assert fetch(app, "GET", "/health", headers=sent).status_code == 200
