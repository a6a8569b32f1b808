"""Spans: one per request, part of the client's trace, without client text."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from outrider.server.settings import Tracing
from outrider.server.telemetry import tracing


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
