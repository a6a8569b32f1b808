"""OpenTelemetry tracing: one span per request, with its queue time and time to first token. Needs the extra `otel`.

Continues the trace of a client that sends `traceparent`. Promises that no span holds what clients send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.settings import Tracing


class TracingError(ValueError):
    """Tracing is set but cannot run; the message says what to do."""


def install(app: FastAPI, settings: Tracing, exporters: Sequence[Any] = ()) -> None:
    """Makes `app` export spans to the configured collector and to `exporters`. Raises TracingError."""
    if settings.endpoint is None and not exporters:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError:
        raise TracingError("tracing.endpoint needs OpenTelemetry; run `pip install outrider[otel]`.") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
    if settings.endpoint is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=f"{settings.endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
    for extra in exporters:
        provider.add_span_processor(SimpleSpanProcessor(extra))
    app.add_middleware(TraceRequests, tracer=provider.get_tracer("outrider"))


class TraceRequests:
    """ASGI middleware: one span per request under /v1/ or /api/, or to /infill, from its arrival to its last byte."""

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(("/v1/", "/api/", "/infill")):
            return await self._app(scope, receive, send)
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        # `tracestate` and `baggage` are left out, because a client may write anything in them.
        parents = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
        carrier = {"traceparent": parents[0]} if parents else {}
        with self._tracer.start_as_current_span("request", context=extract(carrier), kind=SpanKind.SERVER) as span:

            async def send_traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    span.add_event("first byte")
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
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
