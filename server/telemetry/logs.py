"""Logging to stderr, as text lines or as JSON objects.

Promises that no line holds what clients send, unless `logging.prompts` is set.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.settings import Logging

QUIET = ("/health", "/ready", "/metrics")  # polled every few seconds
log = logging.getLogger("outrider.requests")


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object, with the entries of `extra={"fields": ...}` beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """Formats a record as text: time, level, logger, message and fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


def configure(settings: Logging) -> None:
    """Configures this process's logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.format == "json" else HumanFormatter())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class LogRequests:
    """ASGI middleware: a line for each request when its answer has ended: which route, how it went, how long it took."""

    def __init__(self, app: ASGIApp, settings: Logging) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._settings.requests:
            return await self._app(scope, receive, send)
        started, body = time.monotonic(), bytearray()
        fields: dict[str, Any] = {"request_id": "", "method": scope["method"], "route": "", "status": 499}

        async def heard() -> Message:
            message = await receive()
            if self._settings.prompts:
                body.extend(message.get("body", b""))
            return message

        async def said(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields["status"] = message["status"]
                fields["first_byte_ms"] = round(1e3 * (time.monotonic() - started), 1)
            await send(message)

        try:
            await self._app(scope, heard, said)
        finally:
            # Not the path: what matches no route may say anything.
            fields["route"] = getattr(scope.get("route"), "path", "other")
            fields["request_id"] = scope.get("state", {}).get("request_id", "")
            fields["principal"] = scope.get("state", {}).get("principal", "")
            fields |= scope.get("state", {}).get("spent", {})
            fields["ms"] = round(1e3 * (time.monotonic() - started), 1)
            if body:
                fields["body"] = body.decode("utf-8", "replace")
            log.log(logging.DEBUG if fields["route"] in QUIET else logging.INFO, "request", extra={"fields": fields})
