"""The playground's routes: headers, keys, hosts, and the switch that turns them off."""

from __future__ import annotations

import sys

import pytest
from fastapi import FastAPI

from outrider.server.page.routes import HEADERS, STATIC
from tests.server.fakes import FakeEngine, app_with, fetch

FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return app_with(FakeEngine())


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_every_file_has_the_headers(app: FastAPI, path: str) -> None:
    response = fetch(app, "GET", path)
    assert response.status_code == 200
    assert {name: response.headers[name] for name in HEADERS} == HEADERS
    assert response.content == (STATIC / ("index.html" if path == "/" else path.removeprefix("/page/"))).read_bytes()


def test_the_policy_allows_only_this_servers_files() -> None:
    policy = dict(rule.split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_types_are_those_that_browsers_run(app: FastAPI) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page/app.js", "javascript"),
        ("/page/style.css", "text/css"),
        ("/page/icon.svg", "svg"),
    ):
        assert kind in fetch(app, "GET", path).headers["content-type"]


def test_an_unchanged_file_is_not_sent_again(app: FastAPI) -> None:
    tag = fetch(app, "GET", "/page/app.js").headers["etag"]
    assert fetch(app, "GET", "/page/app.js", headers={"If-None-Match": tag}).status_code == 304


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/vendor"])
def test_nothing_else_is_served(app: FastAPI, path: str) -> None:
    assert fetch(app, "GET", path).status_code == 404


def test_the_page_needs_no_key_and_the_api_does() -> None:
    app = app_with(FakeEngine("a"), auth__keys={"alice": "a-key-of-some-length"})
    assert [fetch(app, "GET", path).status_code for path in ("/", "/page/app.js", "/v1/models", "/pages")] == [
        200,
        200,
        401,
        401,
    ]
    assert fetch(app, "POST", "/").status_code == 401


def test_a_foreign_host_gets_no_page(app: FastAPI) -> None:
    assert fetch(app, "GET", "/", headers={"Host": "rebound.example"}).status_code == 421


def test_the_page_can_be_turned_off() -> None:
    app = app_with(FakeEngine(), server__page=False)
    assert [fetch(app, "GET", path).status_code for path in ("/", "/page/app.js", "/health")] == [404, 404, 200]


def test_the_page_is_no_part_of_the_apis_description(app: FastAPI) -> None:
    assert not any(path == "/" or path.startswith("/page") for path in app.openapi()["paths"])


def test_a_server_without_the_page_does_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("outrider.server.page", "outrider.server.page.routes"):
        monkeypatch.delitem(sys.modules, name)
    app_with(FakeEngine(), server__page=False)
    assert "outrider.server.page.routes" not in sys.modules
    app_with(FakeEngine())
    assert "outrider.server.page.routes" in sys.modules
