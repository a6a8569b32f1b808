"""The application of an ingress, over fake replicas."""

from __future__ import annotations

from typing import cast

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from outrider.server.ray.ingress import create_ingress
from outrider.server.ray.remote_engine import ReplicaLost
from outrider.server.settings import load_settings
from tests.server.fakes import events, fetch
from tests.server.ray.test_remote_engine import FakeReplicas, event
from tests.server.ray.test_shared_quotas import FakeCounts

PATH = "/v1/chat/completions"
KEY, METRICS = "alices-secret-key", "the-key-of-metrics"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


async def read_metrics() -> bytes:
    return b"the page of the cluster"


def started(app: FastAPI) -> FastAPI:
    """The application with an engine that has found a replica."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app.state.engine.start(lambda _: None)
        await app.state.engine.wait_started()
        await app(scope, receive, send)

    return cast(FastAPI, call)


def test_the_application_is_that_of_one_machine_with_the_metrics_of_the_cluster() -> None:
    flags = {"auth.keys": {"alice": KEY}, "metrics.key": METRICS}
    app, quotas = create_ingress(load_settings(None, flags), FakeReplicas(), FakeCounts(2), read_metrics)
    assert fetch(app, "GET", "/ready").json() == {"status": "loading", "detail": None}
    assert fetch(started(app), "GET", "/ready").json() == {"status": "ready"}
    assert fetch(app, "POST", PATH, BODY).status_code == 401
    assert fetch(app, "GET", "/metrics", headers={"Authorization": f"Bearer {METRICS}"}).text == "the page of the cluster"
    assert not quotas.held


def test_a_lost_replica_is_the_last_event_of_its_stream() -> None:
    replicas = FakeReplicas([event("a"), event("b", last=True)], [event("a"), ReplicaLost()])
    app, _ = create_ingress(load_settings(), replicas, FakeCounts(2), read_metrics)
    whole = fetch(started(app), "POST", PATH, BODY)
    assert whole.json()["choices"][0]["message"]["content"] == "ab"
    stream = events(fetch(started(app), "POST", PATH, BODY | {"stream": True}))
    assert [each["error"]["code"] for each in stream if "error" in each] == ["worker_unavailable"]
