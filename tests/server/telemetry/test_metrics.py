"""Metrics, of which a step is counted once in each; spans; who may read the metrics page; and logs without client text."""

import json
import logging
import sys
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from msgspec.structs import replace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.engine.fair_queue import Queue
from outrider.server.engine.messages import Status, StepReport
from outrider.server.http.exposition import MetricsPage, create_metrics_app, merged
from outrider.server.settings import Settings, Tracing, load_settings
from outrider.server.telemetry import tracing
from outrider.server.telemetry.logs import HumanFormatter, JsonFormatter
from outrider.server.telemetry.metrics import CLOSINGS, REFUSALS, Metrics
from tests.requests import body
from tests.server.engine.rig import READY
from tests.server.fakes import FakeEngine, app_with, fetch
from tests.servers import ALICE, Served, wait_until


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_step_is_counted() -> None:
    metrics = Metrics()
    metrics.record_step(StepReport(0.001, 0.002, 0.0001, {"trigram": 8}, {"trigram": 2}), tokens=3)
    metrics.record_status(Status(sessions=4, kv_cache_usage_ratio=0.25))
    found = samples(metrics)
    assert found["outrider_steps_total", ()] == 1
    assert found["outrider_generated_tokens_total", ()] == 3
    assert found["outrider_draft_tokens_total", (("drafter", "trigram"),)] == 8
    assert found["outrider_accepted_tokens_total", (("drafter", "trigram"),)] == 2
    assert found["outrider_accepted_tokens_per_position_total", (("position", "2"),)] == 1
    assert found["outrider_accepted_tokens_per_position_total", (("position", "3"),)] == 0
    assert found["outrider_step_seconds_count", (("phase", "verify"),)] == 1
    assert found["outrider_sessions", ()] == 4


def test_counters_start_at_zero() -> None:
    """A series that starts at its first event would hide it: rates are differences between two scrapes."""
    metrics = Metrics()
    metrics.record_step(StepReport(0.001, 0.002, 0.0001, {"lookup": 4}, {}), tokens=1)
    metrics.record_answer("/v1/responses", 200)
    found = samples(metrics)
    assert found["outrider_accepted_tokens_total", (("drafter", "lookup"),)] == 0
    for status, count in (("200", 1), ("500", 0), ("503", 0)):
        assert found["outrider_requests_total", (("endpoint", "/v1/responses"), ("status", status))] == count
    for reason in CLOSINGS:
        assert found["outrider_closed_connections_total", (("reason", reason),)] == 0
    for reason in REFUSALS:
        assert found["outrider_rejected_requests_total", (("reason", reason),)] == 0


def test_an_endpoint_picker_finds_its_gauges_once_the_model_is_loaded() -> None:
    metrics = Metrics()
    assert b"vllm:" not in metrics.render()
    queue = Queue(1, 4, on_run=lambda _: None, on_pause=lambda _: None)
    queue.open(1, 2)
    for name in ("a", "b"):
        queue.enter(name, False, 0, "", 8)
    metrics.record_queue(queue)
    metrics.record_status(Status(sessions=2, kv_cache_usage_ratio=0.9, running_usage_ratio=0.1))  # idle sessions make room
    metrics.record_model(replace(READY, context_tokens=4096, slots=2), ["legal", "sql"])
    found = samples(metrics)
    gauges = [found[f"vllm:{name}", ()] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    assert gauges == [1, 1, 0.1]
    assert found["vllm:cache_config_info", (("block_size", "16"), ("num_gpu_blocks", "512"))] == 1
    lora = {"max_lora": "2", "running_lora_adapters": "legal,sql", "waiting_lora_adapters": ""}
    assert found["vllm:lora_requests_info", tuple(lora.items())] > 0
    assert b'vllm:num_requests_running{model="m"} 1.0' in merged([("m", metrics.render())], "model")


def traced(exporter: InMemorySpanExporter) -> TestClient:
    app = FastAPI()

    @app.post("/v1/things/{name}")
    async def thing(http: Request, name: str) -> dict[str, str]:
        http.state.stats = {"steps": 3, "first_token_ms": 1.5}
        if name == "broken":
            raise RuntimeError("secret")
        return {}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    tracing.install(app, Tracing(), [exporter])
    return TestClient(app, raise_server_exceptions=False)


def test_a_request_is_a_span_of_the_clients_trace() -> None:
    exporter = InMemorySpanExporter()
    client = traced(exporter)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": parent, "tracestate": "vendor=private", "baggage": "user=private"}
    client.post("/v1/things/private-name", headers=headers, json={"prompt": "private"})
    client.get("/health")
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/things/{name}"
    assert span.context is not None and span.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    attributes = dict(span.attributes or {})
    assert attributes["http.response.status_code"] == 200
    assert attributes["outrider.steps"] == 3
    assert "private" not in span.to_json() and not span.context.trace_state
    assert [event.name for event in span.events] == ["first byte"]


def test_a_failure_is_marked() -> None:
    exporter = InMemorySpanExporter()
    traced(exporter).post("/v1/things/broken")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


def test_a_chat_has_the_attributes_and_metrics_of_the_conventions_and_none_of_its_text() -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    app = app_with(FakeEngine("a", "b", "c"), model__aliases=["*"])
    tracing.install(app, Tracing(), [exporter], [reader])
    body: dict[str, Any] = {"model": "private-name", "messages": [{"role": "user", "content": "private"}], "max_tokens": 3}
    assert fetch(app, "POST", "/v1/chat/completions", body).status_code == 200
    assert fetch(app, "POST", "/v1/chat/completions", {**body, "max_tokens": -5}).status_code == 400
    span, refused = exporter.get_finished_spans()
    attributes = dict(span.attributes or {})
    name = Settings().model.served_name
    assert (
        attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": name,
            "gen_ai.response.model": name,
            "gen_ai.request.max_tokens": 3,
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.output_tokens": attributes["outrider.completion_tokens"],
            "gen_ai.usage.input_tokens": attributes["outrider.prompt_tokens"],
        }.items()
    )
    assert "gen_ai.request.model" not in dict(refused.attributes or {})
    data = reader.get_metrics_data()
    assert data is not None
    scope = data.resource_metrics[0].scope_metrics[0]
    found = {metric.name: [*metric.data.data_points] for metric in scope.metrics}
    assert {metric.unit for metric in scope.metrics} == {"s"}
    errors = [(point.attributes or {}).get("error.type") for point in found["gen_ai.server.request.duration"]]
    assert errors == [None, "400"]
    (first,) = found["gen_ai.server.time_to_first_token"]
    assert first.explicit_bounds[:2] == (0.001, 0.005) and first.count == 1
    assert (first.attributes or {})["gen_ai.request.model"] == name
    assert "private" not in span.to_json() + data.to_json()


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


SECRET = "the quick brown secret"


def record(**extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "outrider", "levelname": "INFO", "levelno": 20, "msg": "a %s", "args": ("word",)})
    made.__dict__.update(extra)
    return made


FORGED = "x\n2026-01-01 00:00:00,000 INFO outrider: forged\r\u2028\x85\x1b[2J\u202e"


@pytest.mark.parametrize("formatter", [HumanFormatter(), JsonFormatter()])
def test_a_body_cannot_forge_a_line(formatter: logging.Formatter) -> None:
    line = formatter.format(record(fields={"body": FORGED}))
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert "x\\u000a2026" in line or json.loads(line)["body"] == FORGED


@pytest.mark.parametrize("formatter", [HumanFormatter(), JsonFormatter()])
def test_an_exceptions_message_cannot_forge_a_line(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        first, *others = formatter.format(record(exc_info=sys.exc_info())).splitlines()
    assert "a word" in first
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_requests_are_logged_without_their_content(guarded: Served) -> None:
    headers = {"X-Request-Id": "my-request-7"}
    answer = guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, max_tokens=12), headers=headers)
    assert answer.status_code == 200
    generated = answer.json()["choices"][0]["text"]
    errors = [
        guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, temperature=SECRET)),
        guarded.http.post("/v1/completions", content=SECRET),
        guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {ALICE}x"}),
        guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, stop=[SECRET * 40])),
        guarded.http.post(f"/{SECRET}", json={"prompt": SECRET}, headers={"X-Request-Id": "the-last-one"}),
    ]
    assert [response.status_code for response in errors] == [400, 400, 401, 400, 404]
    # An error may quote an invalid value to its client, but never a key.
    assert all(ALICE not in response.text for response in errors)
    wait_until(lambda: any("the-last-one" in line for line in guarded.log))
    parsed = [json.loads(line) for line in guarded.log if line.startswith("{")]
    lines = {line["request_id"]: line for line in parsed if line["message"] == "request"}
    logged = "\n".join(guarded.log)
    assert SECRET not in logged and ALICE not in logged
    assert not generated.strip() or generated not in logged
    line = lines["my-request-7"]
    assert (line["route"], line["status"], line["principal"]) == ("/v1/completions", 200, "alice")
    assert 0 < line["first_token_ms"] <= line["first_byte_ms"] <= line["ms"]
    assert line["completion_tokens"] == 12
    probe = next(line for line in lines.values() if line["route"] == "/ready")
    assert (line["level"], probe["level"]) == ("info", "debug")
    assert (lines["the-last-one"]["route"], lines["the-last-one"]["status"]) == ("other", 404)
