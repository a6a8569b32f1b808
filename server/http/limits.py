"""A bound on request bodies, as ASGI middleware: a body that is too large is refused before it is read into memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import APIError


class BodyLimit:
    """Answers 413 to bodies of more than `limit_bytes`, announced or not."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit_bytes:
            return await self._error().response()(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit_bytes:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> APIError:
        return APIError(413, f"The body is larger than {self._limit_bytes} bytes; send less.", code="body_too_large")
