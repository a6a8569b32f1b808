"""Passes each valid request to the model that it names, which is loaded first. Meanwhile, a stream has comments."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs

import msgspec
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.encoders.kind import Kind
from outrider.server.engine.engine import EngineError
from outrider.server.http.errors import ANTHROPIC_PATHS, OLLAMA_PREFIX, APIError, as_api_error
from outrider.server.http.json_body import InvalidJSON, decode
from outrider.server.http.json_route import INLINE_BYTES, BodyPool, turn_of
from outrider.server.http.sse import HEADERS
from outrider.server.models.catalog import Entry
from outrider.server.models.gate import Gate
from outrider.server.models.pool import DOES, Model, Pool
from outrider.server.ollama.endpoint import DISPATCHED
from outrider.server.ollama.schema import seconds_of

COMMENT_SECONDS = 1.0
# All other paths are for models that write text.
ENCODER_PATHS: dict[str, Kind] = {
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
}
STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
    ],
}


class Named(msgspec.Struct):
    """The fields of a body that say which model answers, and how."""

    model: Any = None
    stream: Any = None
    keep_alive: Any = None  # of Ollama's API
    name: Any = None  # of the model, in Ollama's older clients


class Dispatcher:
    """An ASGI application."""

    def __init__(self, pool: Pool, bodies: BodyPool, gate: Gate, reader_of: Callable[[Entry], ASGIApp]) -> None:
        """`reader_of` returns what answers a GET for a model that is not loaded."""
        self._pool, self._bodies, self._gate, self._reader_of = pool, bodies, gate, reader_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DISPATCHED] = time.monotonic()
        kind, is_ollamas = ENCODER_PATHS.get(scope["path"]), scope["path"].startswith(OLLAMA_PREFIX)
        if not self._gate.has_route(scope, kind):
            await self._gate.admits(scope, receive, send, kind)
            return
        data = await read(receive)
        named = await self._named(scope, data)
        query = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])[0]
        told = (named.model or named.name) if is_ollamas else named.model
        model = self._pool.find(told if isinstance(told, str) else query, kind)
        if model.is_known:
            check_kind(model, kind)
        if model.loaded is None and not await self._gate.admits(scope, replay(data, receive), send, kind):
            return
        replayed = replay(data, receive)
        if model.loaded is None and scope["method"] == "GET":  # all of them tell what is in files
            reader = await asyncio.to_thread(self._reader_of, model.entry)
            return await reader(scope, replayed, send)
        if named.stream is True and model.loaded is None and kind is None and not is_ollamas:
            return await self._stream(model, scope, replayed, send)
        idle_seconds = None
        with suppress(ValueError):  # the model's endpoint refuses it
            idle_seconds = seconds_of(named.keep_alive) if is_ollamas else None
        async with self._pool.use(model, idle_seconds) as loaded:
            check_kind(model, kind)
            await loaded.app(scope, replayed, send)

    async def _named(self, scope: Scope, data: bytes) -> Named:
        """The model that a body names. Raises APIError if it is no JSON object."""
        if not data:
            return Named()
        if len(data) <= INLINE_BYTES:
            return named_in(data)
        return await self._bodies.run(turn_of(Request(scope)), lambda: named_in(data))

    async def _stream(self, model: Model, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream of a model that is not loaded. Its status is 200 from the start, so an error is an event."""
        await send(STREAM_START)
        rest = RestOfStream(scope, send)
        try:
            async with AsyncExitStack() as stack:
                async with commenting(send, f"loading {model.entry.name}"):
                    loaded = await stack.enter_async_context(self._pool.use(model))
                check_kind(model, None)
                await loaded.app(scope, receive, rest)
        except (APIError, EngineError) as error:
            await rest.end(as_api_error(error))


class RestOfStream:
    """`send` of an application whose answer continues a stream that has begun."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._is_stream = False
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_stream = message["status"] == 200
        elif self._is_stream:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(self._body)

    async def end(self, error: APIError) -> None:
        await self._end(bytes(error.response(self._scope).body))

    async def _end(self, body: bytes) -> None:
        name = b"event: error\n" if self._scope["path"] in ANTHROPIC_PATHS else b""
        await self._send({"type": "http.response.body", "body": name + b"data: " + body + b"\n\n", "more_body": False})


def check_kind(model: Model, kind: Kind | None) -> None:
    """Raises APIError if the model does something else than a path is for."""
    if model.kind == kind:
        return
    paths = [path for path, each in ENCODER_PATHS.items() if each == model.kind]
    instead = f"its only endpoint is {paths[0]}" if paths else f"name one that {DOES[kind]}"
    raise APIError(400, f"{model.entry.name} {DOES[model.kind]}; {instead}.", "model", "wrong_model")


def named_in(data: bytes) -> Named:
    """The model that a body names. Raises APIError if it is no JSON object."""
    try:
        return msgspec.json.decode(data, type=Named)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        decode(data)
    except InvalidJSON as error:
        raise APIError(400, f"The body {error}.", code=error.code) from None
    raise APIError(400, "The body must be a JSON object.", code="invalid_json")


async def read(receive: Receive) -> bytes:
    """The whole body, as long as the middleware allows."""
    data = bytearray()
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(data)


def replay(data: bytes, receive: Receive) -> Receive:
    """Receives a body that was read, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


@asynccontextmanager
async def commenting(send: Send, text: str) -> AsyncIterator[None]:
    """Meanwhile, a comment each second tells a stream's client what it waits for."""

    async def comment() -> None:
        started = time.monotonic()
        while True:
            line = f": {text}, {time.monotonic() - started:.0f} s\n\n".encode()
            await send({"type": "http.response.body", "body": line, "more_body": True})
            await asyncio.sleep(COMMENT_SECONDS)

    task = asyncio.create_task(comment())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
