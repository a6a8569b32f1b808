"""The metrics page: open without keys, never open to API keys, and a slow snapshot if streams are coalesced."""

import time
from typing import Any

import httpx
import pytest

from outrider.server.http.exposition import MetricsPage, create_metrics_app
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from tests.server.fakes import FakeEngine, app_with, fetch

KEYS = {"alice": "a-key-of-some-length"}
KEY = "the-key-of-metrics"


def page(key: str | None = None, **settings: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return fetch(app_with(FakeEngine("a"), **settings), "GET", "/metrics", headers=headers)


def test_a_client_cannot_follow_the_steps_of_anothers_answer() -> None:
    for key in (None, KEYS["alice"]):
        answer = page(key, auth__keys=KEYS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "metrics_not_available")
        assert "metrics.port" in answer.json()["error"]["message"] and "metrics.key" in answer.json()["error"]["message"]


def test_the_page_can_have_a_key() -> None:
    for keys in ({}, KEYS):
        assert page(auth__keys=keys, metrics__key=KEY).status_code == 401
        assert page(KEYS["alice"], auth__keys=keys, metrics__key=KEY).status_code == 401
        assert page(KEY, auth__keys=keys, metrics__key=KEY).status_code == 200


@pytest.mark.parametrize("keys", [{}, KEYS])
def test_the_page_can_have_a_port(keys: dict[str, str]) -> None:
    assert page(auth__keys=keys, metrics__port=0).status_code == 404
    settings = load_settings(None, {"auth.keys": keys, "metrics.port": 0, "metrics.host": "metrics.internal"})
    app = create_metrics_app(settings, MetricsPage(settings, Metrics().read))
    answer = fetch(app, "GET", "/metrics")
    assert answer.text.startswith("# HELP") and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for path in ("/v1/models", "/openapi.json", "/docs"):
        assert fetch(app, "GET", path).status_code == 404
    statuses = {
        host: fetch(app, "GET", "/metrics", headers={"Host": host}).status_code for host in ("evil", "metrics.internal")
    }
    assert statuses == {"evil": 421, "metrics.internal": 200}


def test_the_page_of_a_server_that_coalesces_is_a_slow_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks and however often: steps within SNAPSHOT_SECONDS cannot be told apart."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    app = app_with(FakeEngine("a"), server__coalesce_ms=100)
    first = fetch(app, "GET", "/metrics").text
    pages = set()
    for step in range(9):
        now = 1000.0 + step
        app.state.metrics.steps.inc()
        pages.add(fetch(app, "GET", "/metrics").text)
    assert pages == {first}
    now = 1010.0
    assert "outrider_steps_total 9.0" in fetch(app, "GET", "/metrics").text
