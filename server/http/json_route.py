"""Routes whose endpoints take JSON. Large bodies are decoded and validated off the event loop, in their principal's turn.

Promises that the time of a body costs its own principal: one large body per principal is processed at a time, and principals
take turns. A list that is longer than its limit is refused before it is validated.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from outrider.server.fair_threads import ANYONE, FairThreads
from outrider.server.http.errors import APIError, from_validation
from outrider.server.http.json_body import InvalidJSON, decode

T = TypeVar("T")
# A body of this size is decoded and validated in about a millisecond, so a thread is not worth it.
INLINE_BYTES = 1 << 14


class BodyPool:
    """The thread that processes large bodies, and the limits of lists by field."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._pool = FairThreads([None], "outrider-bodies")
        self._limits = limits

    async def run(self, principal: str, work: Callable[[], T]) -> T:
        """The result of `work`, which runs in the principal's turn."""
        return await self._pool.run(principal, lambda _: work())

    def read(self, data: bytearray, model: type[BaseModel]) -> BaseModel:
        """The validated body. Raises APIError."""
        body = self.decode(data)
        try:
            return model.model_validate(body)
        except ValidationError as error:
            invalid = RequestValidationError(error.errors(include_url=False, include_input=False))
            raise from_validation(invalid) from None

    def decode(self, data: bytearray) -> Any:
        """The decoded body. Raises APIError."""
        try:
            body = decode(data)
        except InvalidJSON as error:
            raise APIError(400, f"The body {error}.", code=error.code) from None
        for name, limit in self._limits.items() if isinstance(body, dict) else ():
            if isinstance(values := body.get(name), list) and len(values) > limit:
                message = f"Invalid '{name}': at most {limit} {name} are allowed, not {len(values)}."
                raise APIError(400, message, name, "too_many")
        return body

    def close(self) -> None:
        """Drops the waiting work, and blocks until the running work is finished."""
        self._pool.close()


async def in_turn(http: Request, work: Callable[[], T], size_bytes: int | None = None) -> T:
    """The result of `work` for a request; of a large body, off the event loop in its principal's turn.

    `size_bytes` is the size of what it reads or writes; None = of the request's body.
    """
    if (http.scope.get("body_bytes", 0) if size_bytes is None else size_bytes) <= INLINE_BYTES:
        return work()
    pool: BodyPool = http.app.state.bodies
    return await pool.run(turn_of(http), work)


def turn_of(http: Request) -> str:
    """Whose turn a request takes: its principal's, or its address's on a server without keys."""
    principal = str(getattr(http.state, "principal", ANYONE))
    return f"{principal} {http.client.host}" if principal == ANYONE and http.client is not None else principal


class JSONRequest(Request):
    """A request whose body is decoded by `decode`, and, if it is large, validated as `model`."""

    model: type[BaseModel] | None = None
    _data: bytearray | None = None

    async def body(self) -> bytes:
        """The first byte. The others are for `json` only, which does not keep them: an answer may take minutes."""
        if self._data is None:
            if (encoding := self.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
                message = f"A body with the Content-Encoding {encoding[:40]!r} is not supported; send it as it is."
                raise APIError(415, message, code="unsupported_encoding")
            self._data = await self._read()
            self._body = bytes(self._data[:1])
        return self._body

    async def _read(self) -> bytearray:
        data = bytearray()
        try:
            async for chunk in self.stream():
                data += chunk
        except BaseException:
            data.clear()  # the error's traceback refers to it, until the next garbage collection
            raise
        return data

    async def json(self) -> Any:
        """The decoded or validated body. Raises APIError."""
        await self.body()
        data, self._data = self._data or bytearray(), bytearray()
        self.scope["body_bytes"] = len(data)
        bodies: BodyPool = self.app.state.bodies
        model = self.model
        if len(data) <= INLINE_BYTES or model is None:
            return bodies.decode(data)
        try:
            return await bodies.run(turn_of(self), lambda: bodies.read(data, model))
        finally:
            self.scope.get("body_done", lambda: None)()


class JSONRoute(APIRoute):
    """A route whose endpoint receives a `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        annotation: Any = self.body_field.field_info.annotation if self.body_field is not None else None

        async def handle(request: Request) -> Response:
            json_request = JSONRequest(request.scope, request.receive)
            json_request.model = annotation
            return await handler(json_request)

        return handle
