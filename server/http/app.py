"""The HTTP application: routes, and the life of the engine behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from transformers import PreTrainedTokenizerBase

from server.http import errors
from server.http.auth import Authenticator
from server.http.errors import APIError
from server.http.headers import RequestHeaders
from server.http.limits import BodyLimit
from server.openai.responses import ResponsesBody
from server.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.openai.service import Service
from server.settings import Settings
from server.telemetry import tracing
from server.telemetry.logs import LogRequests
from server.telemetry.metrics import CountRequests


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

    app = FastAPI(
        title="Outrider",
        version=version("outrider"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=errors.DOCUMENTED,
    )
    app.openapi = lambda: described(app)  # type: ignore[method-assign]
    app.state.service = service
    app.add_middleware(BodyLimit, limit_bytes=settings.limits.body_bytes)
    app.add_middleware(CountRequests, metrics=service.metrics)
    app.add_middleware(LogRequests, settings=settings.logging)
    app.add_middleware(RequestHeaders)
    tracing.install(app, settings.tracing)
    if settings.server.cors_origins:
        allowed = list(settings.server.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])
    errors.install(app)
    add_routes(app, service)
    return app


def described(app: FastAPI) -> dict[str, Any]:
    """The API's own description: FastAPI's, but that wrong bodies are a 400 here."""
    if not app.openapi_schema:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = made
    return app.openapi_schema


def add_routes(app: FastAPI, service: Service) -> None:
    """All endpoints; those that cost something ask for a key."""
    guards = [Depends(Authenticator(service.settings.auth.keys))]
    v1 = APIRouter(prefix="/v1", dependencies=guards)
    add_generation(v1, service)
    add_responses(v1, service)
    add_models(v1, service)
    app.include_router(v1)
    tokens = APIRouter(dependencies=guards)
    add_tokens(tokens, service)
    app.include_router(tokens)
    add_state(app, service)


def add_generation(v1: APIRouter, service: Service) -> None:
    """Chats and completions."""

    @v1.post("/chat/completions")
    async def chat(http: Request, body: ChatBody) -> Response:
        return await service.chat(http, body)

    @v1.post("/completions")
    async def completions(http: Request, body: CompletionBody) -> Response:
        return await service.complete(http, body)


def add_responses(v1: APIRouter, service: Service) -> None:
    """/v1/responses."""

    @v1.post("/responses")
    async def responses(http: Request, body: ResponsesBody) -> Response:
        return await service.respond(http, body)

    @v1.get("/responses/{identity}")
    async def response(http: Request, identity: str) -> dict[str, Any]:
        return service.responses.get(identity, http.state.principal).response

    @v1.delete("/responses/{identity}")
    async def forget(http: Request, identity: str) -> dict[str, Any]:
        service.responses.delete(identity, http.state.principal)
        return {"id": identity, "object": "response", "deleted": True}

    @v1.post("/responses/{identity}/cancel")
    async def cancel(http: Request, identity: str) -> dict[str, Any]:
        service.responses.get(identity, http.state.principal)
        raise APIError(
            400, "Only a response in the background can be cancelled; close the connection of others.", "response_id"
        )


def add_models(v1: APIRouter, service: Service) -> None:
    """/v1/models."""

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card()]}

    @v1.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.settings.model.served_name:
            raise APIError(404, f"The model {name!r} does not exist here.", "model", "model_not_found")
        return service.card()


def add_tokens(tokens: APIRouter, service: Service) -> None:
    """/tokenize and /detokenize."""

    @tokens.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        return await service.tokenize(body)

    @tokens.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        return {"prompt": await service.prompts.decode(body.tokens)}


def add_state(app: FastAPI, service: Service) -> None:
    """How the server is doing."""

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
