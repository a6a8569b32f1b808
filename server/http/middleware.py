"""ASGI middleware: body limit, response headers, request metrics and log."""

import asyncio
import logging
import time
import uuid
from typing import Any

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.fair_threads import ANYONE
from outrider.server.http.body_budget import SMALL_BYTES, BodyBudget
from outrider.server.http.errors import ANTHROPIC_PATHS, CLIENT_CLOSED_REQUEST, APIError, ClientLeft
from outrider.server.settings import Logging
from outrider.server.telemetry.metrics import Metrics

# A body must arrive at least this fast.
MIN_BYTES_PER_SECOND = 1 << 14
# These paths are polled every few seconds, so they are logged at level debug only.
PROBES = ("/health", "/v1/health", "/ready", "/metrics", "/version", "/v1/models")
log = logging.getLogger("outrider.requests")


def route_of(scope: Scope) -> str:
    """The matched route's path template, or "other". Never the path itself, which may contain anything."""
    return getattr(scope.get("route"), "path", "other")


class Receiving:
    """One body: its time, and its share of the memory of all bodies, until `give_back`."""

    def __init__(self, scope: Scope, receive: Receive, budget: BodyBudget, size: int, seconds: float) -> None:
        """`size`: bytes, at most; `seconds`: as in `BodyLimit`."""
        principal, client = scope.get("state", {}).get("principal", ""), scope.get("client") or ("",)
        self._client = f"{principal} {client[0]}" if principal in ("", ANYONE) else principal
        self._receive, self._budget, self._size, self._seconds = receive, budget, size, seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._held_bytes = 0
        self._complete = False
        self.received_bytes = 0

    async def receive(self) -> Message:
        """The next message. Raises APIError if it does not come in time, or if the client leaves before the body's end."""
        if self._complete:  # the only message left is the disconnect
            return await self._receive()
        if self._size > SMALL_BYTES and not self._held_bytes:
            await self._take()
        try:
            async with asyncio.timeout_at(self._deadline + self.received_bytes / MIN_BYTES_PER_SECOND):
                message = await self._receive()
        except TimeoutError:
            raise APIError(408, "The body did not arrive in time; send it faster.", code="body_too_slow") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        self.received_bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        return message

    def give_back(self) -> None:
        """The body has been decoded, or is not needed."""
        held, self._held_bytes = self._held_bytes, 0
        if held:
            self._budget.give(self._client, held)

    async def _take(self) -> None:
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._seconds):
                self._held_bytes = await self._budget.take(self._client, self._size)
        except TimeoutError:
            message = "Too many large bodies are being received; send fewer at a time, and retry later."
            raise APIError(429, message, code="too_many_bodies", retry_seconds=self._seconds) from None
        self._deadline += asyncio.get_running_loop().time() - started


class BodyLimit:
    """Rejects bodies larger than `limit_bytes` with a 413 before they are in memory, with or without a Content-Length.

    Rejects bodies that do not arrive within `limit_seconds`, and one second more per MIN_BYTES_PER_SECOND, with a 408. Reads a
    large body only when `budget` has room for it, and answers with a 429 if there is none in that time.
    """

    def __init__(self, app: ASGIApp, limit_bytes: int, limit_seconds: float, budget: BodyBudget | None = None) -> None:
        self._app = app
        self._budget = budget or BodyBudget()
        self._limit_bytes = limit_bytes
        self._limit_seconds = limit_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit_bytes:
            return await self._too_large().response(scope)(scope, receive, send)
        size = self._limit_bytes if b"transfer-encoding" in headers or not declared.isdigit() else int(declared)
        body = Receiving(scope, receive, self._budget, size, self._limit_seconds)
        scope["body_done"] = body.give_back

        async def limited_receive() -> Message:
            message = await body.receive()
            if body.received_bytes > self._limit_bytes:
                raise self._too_large()
            return message

        try:
            await self._app(scope, limited_receive, send)
        finally:
            body.give_back()

    def _too_large(self) -> APIError:
        return APIError(413, f"The body is larger than {self._limit_bytes} bytes; send less.", code="body_too_large")


class HeadRequests:
    """Answers HEAD where GET is: with the same status and headers, and without a body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, without_body)
        finally:
            scope.update({name: inner[name] for name in ("route", "endpoint") if name in inner})  # for metrics and logs


class PathPrefix:
    """Takes `prefix` off the paths of requests, so that all else knows the API's own paths. A proxy may have done so before."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix and scope["method"] in ("GET", "HEAD"):  # the page's links are relative to a folder
            return await RedirectResponse(f"{self._prefix}/", 308)(scope, receive, send)
        if path.startswith(f"{self._prefix}/"):
            scope["path"] = path.removeprefix(self._prefix)
        await self._app(scope, receive, send)


class ResponseHeaders:
    """Adds `x-request-id` (a new one, unless `Authenticator` takes the client's) and `openai-processing-ms` to every response.

    On the paths of Anthropic's API, `request-id` has the same value.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.monotonic()
        state = scope.setdefault("state", {})
        state["request_id"] = f"req_{uuid.uuid4().hex}"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = state["request_id"].encode()
                milliseconds = str(round(1e3 * (time.monotonic() - started))).encode()
                added = [(b"x-request-id", request_id), (b"openai-processing-ms", milliseconds)]
                if scope["path"] in ANTHROPIC_PATHS:
                    added.append((b"request-id", request_id))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


class RecordRequests:
    """Counts responses by route and status, and logs one line per request after its response, with its timings.

    Logs bodies only with `logging.prompts`. An answer that begins after its client has left gets the status 499, whatever it
    would have been: the client cannot read it, so logs, metrics and traces count no error that nobody was told of. The
    connection says by `scope["closed_status"]` that the client has left; without that, the application has received it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, settings: Logging) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, body = time.monotonic(), bytearray()
        status: dict[str, Any] = {"status": CLIENT_CLOSED_REQUEST}  # no response

        received: int | None = None

        async def recording_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.disconnect":
                received = CLIENT_CLOSED_REQUEST
            if self._settings.prompts:
                body.extend(message.get("body", b""))
            return message

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                status["status"] = scope.get("closed_status", lambda: None)() or received or message["status"]
                message = {**message, "status": status["status"]}
                status["first_byte_ms"] = round(1e3 * (time.monotonic() - started), 1)
                self._metrics.record_answer(route_of(scope), status["status"])
            await send(message)

        try:
            await self._app(scope, recording_receive, recording_send)
        except Exception:  # an outer handler answers with a 500
            if "first_byte_ms" not in status:
                self._metrics.record_answer(route_of(scope), 500)
            raise
        finally:
            state, route = scope.get("state", {}), route_of(scope)
            fields = {
                "request_id": state.get("request_id", ""),
                "method": scope["method"],
                "route": route,
                **status,
                "principal": state.get("principal", ""),
                **state.get("stats", {}),
                "ms": round(1e3 * (time.monotonic() - started), 1),
            }
            if body:
                fields["body"] = body.decode("utf-8", "replace")
            log.log(logging.DEBUG if route in PROBES else logging.INFO, "request", extra={"fields": fields})
