"""OpenTelemetry: one span per request, with its times and tokens, and the `gen_ai` metrics. Needs the extra `otel`.

Continues the trace of a client that sends `traceparent`. Promises that no span holds what clients send.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.settings import Tracing
from outrider.server.telemetry.gen_ai import OPERATIONS, PROVIDER, ServerMetrics, of_answer


class TracingError(ValueError):
    """Tracing is set but cannot run; the message says what to do."""


def install(app: FastAPI, settings: Tracing, exporters: Sequence[Any] = (), readers: Sequence[Any] = ()) -> None:
    """Exports spans of `app` to the collector and to `exporters`, and metrics to it and `readers`. Raises TracingError."""
    if settings.endpoint is None and not (exporters or readers):
        return
    try:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError:
        raise TracingError("tracing.endpoint needs OpenTelemetry; run `pip install outrider[otel]`.") from None
    resource, readers = Resource.create({"service.name": "outrider"}), list(readers)
    provider = TracerProvider(resource=resource)
    if settings.endpoint is not None:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        collector = settings.endpoint.rstrip("/")
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{collector}/v1/traces")))
        passes = iter([True])  # a collector of traces alone refuses metrics each time, and one record says so
        logging.getLogger(metric_exporter.__name__).addFilter(lambda _: next(passes, False))
        readers.append(PeriodicExportingMetricReader(metric_exporter.OTLPMetricExporter(f"{collector}/v1/metrics")))
    for extra in exporters:
        provider.add_span_processor(SimpleSpanProcessor(extra))
    meter = MeterProvider(readers, resource).get_meter("outrider")
    app.add_middleware(TraceRequests, tracer=provider.get_tracer("outrider"), metrics=ServerMetrics(meter))


class TraceRequests:
    """ASGI middleware: one span per request under /v1/ or /api/, or to /infill, from its arrival to its last byte."""

    def __init__(self, app: ASGIApp, tracer: Any, metrics: ServerMetrics) -> None:
        self._app = app
        self._tracer = tracer
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(("/v1/", "/api/", "/infill")):
            return await self._app(scope, receive, send)
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        # `tracestate` and `baggage` are left out, because a client may write anything in them.
        parents = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
        carrier = {"traceparent": parents[0]} if parents else {}
        started, status = time.monotonic(), 500  # where the response has not begun
        with self._tracer.start_as_current_span("request", context=extract(carrier), kind=SpanKind.SERVER) as span:

            async def send_traced(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    span.add_event("first byte")
                    if status >= 500:
                        span.set_status(StatusCode.ERROR)
                        span.set_attribute("error.type", str(status))
                await send(message)

            try:
                await self._app(scope, receive, send_traced)
            finally:
                state = scope.get("state", {})
                route = getattr(scope.get("route"), "path", "other")
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)
                span.set_attribute("outrider.request_id", state.get("request_id", ""))
                for name, value in state.get("stats", {}).items():
                    span.set_attribute(f"outrider.{name}", value)
                if operation := OPERATIONS.get(route):
                    span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER})
                    span.set_attributes(of_answer(state))
                    self._metrics.record(operation, state, time.monotonic() - started, status)
