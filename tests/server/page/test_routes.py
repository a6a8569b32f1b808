"""The playground's routes: headers, keys, hosts, and the switch that turns them off."""

from __future__ import annotations

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


def test_the_page_needs_no_key_and_the_api_does() -> None:
    app = app_with(FakeEngine("a"), auth__keys={"alice": "a-key-of-some-length"})
    assert [fetch(app, "GET", path).status_code for path in ("/", "/page/app.js", "/v1/models", "/pages")] == [
        200,
        200,
        401,
        401,
    ]
    assert fetch(app, "POST", "/").status_code == 401


def test_the_page_can_be_turned_off() -> None:
    app = app_with(FakeEngine(), server__page=False)
    assert [fetch(app, "GET", path).status_code for path in ("/", "/page/app.js", "/health")] == [404, 404, 200]
