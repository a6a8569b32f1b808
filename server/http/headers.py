"""Headers of every answer, as ASGI middleware: the request's id, and how long the server has taken."""

from __future__ import annotations

import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SANE = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestHeaders:
    """`x-request-id`, the one that the client sent if it is harmless, else a new one; and `openai-processing-ms`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.monotonic()
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        identity = given if SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}".encode()
        scope.setdefault("state", {})["request_id"] = identity.decode()

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                milliseconds = str(round(1e3 * (time.monotonic() - started))).encode()
                extra = [(b"x-request-id", identity), (b"openai-processing-ms", milliseconds)]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        await self._app(scope, receive, marked)
