"""The HTTP application: routes, and the life of the engine behind them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import PreTrainedTokenizerBase

from server import errors, messages
from server.answers import Answerer, Asked, ChatShape, CompletionShape, Shape
from server.auth import Authenticator
from server.engine import Engine
from server.errors import APIError
from server.limits import BodyLimit
from server.metrics import CountRequests, Metrics
from server.prompt import PromptEncoder
from server.schema import ChatBody, CompletionBody, GenerationBody
from server.settings import Settings

T = TypeVar("T")


class Service:
    """What the routes share."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.engine = Engine(settings, self.metrics)
        self.prompts = PromptEncoder(tokenizer)
        self.answers = Answerer(self.engine, self.metrics)
        self.started = int(time.time())

    async def chat(self, http: Request, body: ChatBody) -> Response:
        """POST /v1/chat/completions."""
        arrived = time.monotonic()
        self._check(body)
        if len(body.messages) > self.settings.limits.messages:
            raise APIError(400, f"At most {self.settings.limits.messages} messages are allowed.", "messages", "too_many")
        prompt = await self.prompts.chat([message.rendered() for message in body.messages])
        return await self._answer(http, body, ChatShape(), [prompt], body.token_limit, arrived)

    async def complete(self, http: Request, body: CompletionBody) -> Response:
        """POST /v1/completions."""
        arrived = time.monotonic()
        self._check(body)
        prompts = [await self.prompts.text(prompt) for prompt in body.prompts]
        return await self._answer(http, body, CompletionShape(), prompts, body.token_limit, arrived)

    def _check(self, body: GenerationBody) -> None:
        """The bounds that the settings give. Raises APIError."""
        limits, served = self.settings.limits, self.settings.model.served_name
        if body.model != served:
            message = f"The model {body.model!r} does not exist here; this server serves {served!r}."
            raise APIError(404, message, "model", "model_not_found")
        if (body.n or 1) > limits.choices:
            raise APIError(400, f"'n' is {body.n}, but at most {limits.choices} choices are allowed.", "n", "too_many")
        if len(body.stops) > limits.stop_strings:
            message = f"'stop' has {len(body.stops)} strings, but at most {limits.stop_strings} are allowed."
            raise APIError(400, message, "stop", "too_many")
        if any(len(stop) > limits.stop_characters for stop in body.stops):
            raise APIError(400, f"A stop string may have at most {limits.stop_characters} characters.", "stop", "too_long")

    async def _answer(
        self, http: Request, body: GenerationBody, shape: Shape, prompts: list[list[int]], limit: int | None, arrived: float
    ) -> Response:
        context = (await self.engine.wait_started()).context_tokens
        identity = shape.prefix + uuid.uuid4().hex
        requests = [self._request(http, body, f"{identity}-{i}", prompt, limit, context) for i, prompt in enumerate(prompts)]
        report = bool(body.speculation and body.speculation.report)
        model = self.settings.model.served_name
        asked = Asked(identity, model, shape, requests, body.include_usage, report, arrived)
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            chunks = await unless_gone(http, started(self.answers.stream(asked)))
            if chunks is None:
                return Response(status_code=499)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
        whole = await unless_gone(http, self.answers.whole(asked))
        return Response(status_code=499) if whole is None else JSONResponse(whole)

    def _request(
        self, http: Request, body: GenerationBody, identity: str, prompt: list[int], limit: int | None, context: int
    ) -> messages.Request:
        if not prompt:
            raise APIError(400, "The prompt is empty; give at least one token.", "prompt", "invalid_value")
        if len(prompt) >= context:
            message = f"The prompt has {len(prompt)} tokens, but this model's context holds {context}; shorten the prompt."
            raise APIError(400, message, "prompt", "context_length_exceeded")
        session = body.session_id or http.headers.get("x-session-id") or body.prompt_cache_key
        speculation = body.speculation
        return messages.Request(
            id=identity,
            prompt=prompt,
            params=body.sampling,
            max_tokens=min(limit or context, context - len(prompt)),
            stop=body.stops,
            choices=body.n or 1,
            principal=http.state.principal,
            session=session[:256] if session else None,
            drafter=speculation.drafter if speculation else None,
            max_nodes=speculation.max_nodes if speculation else None,
        )

    def card(self) -> dict[str, Any]:
        """The served model as /v1/models lists it."""
        return {"id": self.settings.model.served_name, "object": "model", "created": self.started, "owned_by": "outrider"}


async def started(chunks: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The stream with its first chunk already there, so that an early error still gets a status of its own."""
    first = await anext(chunks, b"")

    async def rest() -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    return rest()


async def unless_gone(http: Request, work: Awaitable[T]) -> T | None:
    """What `work` returns, or None as soon as the client is gone: then `work` is cancelled."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait({task, watch})


def create_app(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    on_start: Callable[[], None] = lambda: None,
    on_failure: Callable[[str], None] = lambda _: None,
) -> FastAPI:
    """The application. `on_start` is called when the worker is on its way, `on_failure` told in one sentence if it is lost."""
    service = Service(settings, tokenizer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.engine.start(on_failure)
        on_start()
        yield
        await service.engine.stop()

    app = FastAPI(title="Outrider", version=version("outrider"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(BodyLimit, limit_bytes=settings.limits.body_bytes)
    app.add_middleware(CountRequests, metrics=service.metrics)
    errors.install(app)
    add_routes(app, service)
    return app


def add_routes(app: FastAPI, service: Service) -> None:
    """All endpoints."""
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(Authenticator(service.settings.auth.keys))])

    @v1.post("/chat/completions")
    async def chat(http: Request, body: ChatBody) -> Response:
        return await service.chat(http, body)

    @v1.post("/completions")
    async def completions(http: Request, body: CompletionBody) -> Response:
        return await service.complete(http, body)

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card()]}

    @v1.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.settings.model.served_name:
            raise APIError(404, f"The model {name!r} does not exist here.", "model", "model_not_found")
        return service.card()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        engine = service.engine
        if engine.ready:
            return JSONResponse({"status": engine.state})
        return JSONResponse({"status": engine.state, "detail": engine.failure}, 503)

    @app.get("/version")
    async def app_version() -> dict[str, str]:
        return {"version": version("outrider")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(v1)
