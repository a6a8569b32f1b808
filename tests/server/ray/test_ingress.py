"""The command `outrider deploy`, and the application of an ingress over fake replicas."""

from typing import cast

import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from outrider.server.cli import app
from outrider.server.ray import command
from outrider.server.ray.ingress import create_ingress
from outrider.server.ray.remote_engine import ReplicaLost
from outrider.server.ray.scale import Scale
from outrider.server.settings import SettingsError, load_settings
from tests.server.fakes import events, fetch
from tests.server.ray.test_coordinator import FakeCounts, FakeReplicas, event

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


def test_a_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["deploy"])
    assert result.exit_code == 2
    assert "pip install 'outrider[ray]'" in result.output


@pytest.mark.parametrize("arguments", [["--replicas", "0"], ["--nonsense", "1"], ["--replicas", "3", "--max-replicas", "2"]])
def test_wrong_options_are_refused_before_ray_is_started(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    result = CliRunner().invoke(app, ["deploy", *arguments])
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_new_cluster_without_room_is_refused_and_a_running_one_warned(capsys: pytest.CaptureFixture[str]) -> None:
    scale = Scale(replicas=2, gpus=1)
    with pytest.raises(SettingsError, match=r"reserves 2 GPUs, and the cluster has 1; use fewer --replicas or --gpus"):
        command.check_room({"CPU": 3.0, "GPU": 1.0}, scale, started=True)
    command.check_room({"CPU": 2.0, "GPU": 2.0}, scale, started=False)
    assert "reserves 3 CPUs, and the cluster has 2" in capsys.readouterr().err
    command.check_room({"CPU": 3.0, "GPU": 2.0}, scale, started=True)
    assert not capsys.readouterr().err
