"""The application: which routes need a key, the state of the engine, middleware, and the API's description."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from outrider.server.engine.messages import Ready
from tests.server.fakes import FakeEngine, app_with, fetch

KEY = "a-key-of-some-length"
OPEN_PATHS = {"/health", "/v1/health", "/ready", "/version", "/metrics"}


def test_all_routes_except_status_routes_need_a_key() -> None:
    app = app_with(FakeEngine("a"), auth__keys={"alice": KEY})
    paths: dict[str, Any] = fetch(app, "GET", "/openapi.json", headers=bearer()).json()["paths"]
    assert len(paths) >= 12 and set(paths) > OPEN_PATHS
    for path, operations in (paths | {"/openapi.json": ["get"], "/nothing": ["get"]}).items():
        for method in operations:
            body = {"prompt": "x", "messages": [], "input": "x", "tokens": []} if method == "post" else None
            response = fetch(app, method.upper(), path.format(identity="x", name="x"), body)
            assert (response.status_code != 401) == (path in OPEN_PATHS), path
    answer = fetch(app, "POST", "/v1/completions", {"prompt": "x"}, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.json()["choices"][0]["text"] == "a"


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


def test_status_routes() -> None:
    engine = FakeEngine()
    app = app_with(engine)
    assert fetch(app, "GET", "/health").json() == {"status": "ok"}
    assert fetch(app, "GET", "/ready").json() == {"status": "ready"}
    assert fetch(app, "GET", "/version").json()["version"]
    engine.ready, engine.state, engine.failure = False, "failed", "No model."
    response = fetch(app, "GET", "/ready")
    assert (response.status_code, response.json()) == (503, {"status": "failed", "detail": "No model."})
    response = fetch(app, "GET", "/health")  # so that an orchestrator restarts the server
    assert (response.status_code, response.json()) == (503, {"status": "failed", "detail": "No model."})
    assert 'outrider_requests_total{endpoint="/ready",status="503"} 1.0' in fetch(app, "GET", "/metrics").text


@pytest.mark.parametrize("kernels", ["", "linear layers: oneDNN; attention: PyTorch"])
def test_the_version_names_the_chosen_kernels(kernels: str) -> None:
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(asyncio.run(engine.wait_started()), kernels=kernels, alone=kernels and "1-1, 4-7")
    found = fetch(app_with(engine), "GET", "/version").json()
    assert found["invariant_rows"] == "off"
    assert found.get("kernels", "") == kernels and ("rows_in_one_thread" in found) == bool(kernels)
    assert found["memory"] == {"file": None, "weights": 1, "caches": 1, "rest": None}


def test_errors_of_any_layer_keep_their_headers_and_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Unexpected errors, errors of the middleware, and preflights."""
    caplog.set_level("INFO", "outrider.requests")
    page = "https://page.example"
    headers = {"Origin": page, "X-Request-Id": "mine"}
    app = app_with(BrokenEngine(), limits__body_bytes=1024, server__cors_origins=[page])
    preflight = {"Access-Control-Request-Method": "POST"}
    assert fetch(app, "OPTIONS", "/v1/completions", headers=headers | preflight).status_code == 200
    for body, extra, status in (({"prompt": "x"}, {}, 500), ({"prompt": "x" * 2000}, {}, 413), ({}, {"Host": "evil"}, 421)):
        response = fetch(app, "POST", "/v1/completions", body, headers=headers | extra)
        assert response.status_code == status
        assert (response.headers["x-request-id"] == "mine") == (status != 421)  # before the host is known, no client chooses it
        assert response.headers["access-control-allow-origin"] == page
        assert response.json()["error"]["message"]
        endpoint = "/v1/completions" if status == 500 else "other"
        assert f'outrider_requests_total{{endpoint="{endpoint}",status="{status}"}} 1.0' in app.state.metrics.render().decode()
    logged = [record.__dict__["fields"] for record in caplog.records if record.name == "outrider.requests"]
    assert [fields["status"] for fields in logged] == [200, 500, 413, 421]
    assert [fields["request_id"] for fields in logged[1:3]] == ["mine", "mine"]


class BrokenEngine(FakeEngine):
    """Fails with an error that no handler expects."""

    async def wait_started(self) -> Ready:
        raise RuntimeError("broken")
