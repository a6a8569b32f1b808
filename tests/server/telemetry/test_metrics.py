"""A step is counted once in each of its metrics, and a request is one span, without client text."""

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.engine.messages import Status, StepReport
from outrider.server.settings import Tracing
from outrider.server.telemetry import tracing
from outrider.server.telemetry.metrics import CLOSINGS, REFUSALS, Metrics


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


def test_requests_of_minutes_have_buckets() -> None:
    metrics = Metrics()
    for name in ("time_to_first_token", "request_duration", "queue"):
        getattr(metrics, name).observe(300.0)
        found = {
            labels: value for (each, labels), value in samples(metrics).items() if each == f"outrider_{name}_seconds_bucket"
        }
        assert [found[("le", end),] for end in ("10.0", "160.0", "320.0", "2560.0")] == [0, 0, 1, 1]


def app_with(exporter: InMemorySpanExporter) -> TestClient:
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
    client = app_with(exporter)
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
    app_with(exporter).post("/v1/things/broken")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
