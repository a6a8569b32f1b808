"""The HTTP application: endpoints, routes, middleware, and the lifespan of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import Lifespan

from outrider.server.anthropic.messages import MessagesEndpoint
from outrider.server.anthropic.schema import CountTokensBody, MessagesBody
from outrider.server.chat.prompt import PromptEncoder
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.corpora.registry import Corpora
from outrider.server.corpora.routes import new_router as new_corpora_router
from outrider.server.corpora.shelves import Usage
from outrider.server.encoders.routes import new_refusals as new_encoder_refusals
from outrider.server.engine.engine import KEEP_ALIVE_SECONDS, Engine
from outrider.server.engine.interface import EngineLike
from outrider.server.http import errors
from outrider.server.http.auth import Authenticator
from outrider.server.http.exposition import MetricsPage, add_metrics_route
from outrider.server.http.json_route import BodyPool, JSONRoute
from outrider.server.http.middleware import BodyLimit, HeadRequests, PathPrefix, RecordRequests, ResponseHeaders
from outrider.server.http.origins import OriginGuard
from outrider.server.http.protocol import READ_SECONDS
from outrider.server.http.quotas import HoldQuota, QuotaKeeper, Quotas
from outrider.server.http.sse import cancel_on_disconnect
from outrider.server.llama.endpoint import InfillEndpoint
from outrider.server.llama.schema import InfillBody
from outrider.server.ollama.description import ServedModel
from outrider.server.ollama.endpoint import OllamaEndpoint
from outrider.server.ollama.routes import new_generation_router, new_models_router
from outrider.server.openai.chat import MAX_MESSAGES, ChatEndpoint
from outrider.server.openai.completions import CompletionsEndpoint
from outrider.server.openai.fields import NO_DEFAULTS
from outrider.server.openai.generation import GenerationRunner
from outrider.server.openai.models import DetokenizeBody, ModelEndpoint, ModelNames, TokenizeBody
from outrider.server.openai.requests import RequestBuilder, no_corpus
from outrider.server.openai.responses.endpoint import ResponsesEndpoint
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.responses.store import ResponseStore, new_store
from outrider.server.openai.responses.store import new_router as new_responses_router
from outrider.server.openai.sampling_defaults import load_sampling_defaults
from outrider.server.openai.schema import ChatBody, CompletionBody
from outrider.server.pictures.service import PictureService
from outrider.server.settings import Settings
from outrider.server.telemetry import tracing
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.errors import ModelError, loading
from outrider.verify.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from outrider.verify.fast_tokenizer import AnyTokenizer


@dataclass(frozen=True)
class Endpoints:
    chat: ChatEndpoint
    completions: CompletionsEndpoint
    responses: ResponsesEndpoint
    models: ModelEndpoint
    messages: MessagesEndpoint
    infill: InfillEndpoint
    ollama: OllamaEndpoint
    prompts: PromptEncoder
    pictures: PictureService
    store: ResponseStore


def new_quotas(settings: Settings, metrics: Metrics, engine: EngineLike) -> QuotaKeeper:
    return Quotas(settings.auth, metrics, lambda: engine.seconds_per_request)


def create_app(
    settings: Settings,
    tokenizer: AnyTokenizer,
    on_start: Callable[[], None] = lambda: None,
    on_failure: Callable[[str], None] = lambda _: None,
    new_engine: Callable[[Settings, Metrics], EngineLike] = Engine,
    new_quotas: Callable[[Settings, Metrics, EngineLike], QuotaKeeper] = new_quotas,
    metrics: Metrics | None = None,
    read_metrics: Callable[[], Awaitable[bytes]] | None = None,
) -> FastAPI:
    """The application. Calls `on_start` when the worker is starting, and `on_failure` with one sentence if it cannot start.

    The engine is `app.state.engine`; `app.state.metrics` and `app.state.metrics_page` are what the HTTP server needs. The last
    four arguments replace what serves one machine with what serves a cluster; `read_metrics` returns the metrics page.
    """
    metrics = metrics or Metrics(coarse=settings.server.coalesce_ms > 0)
    engine = new_engine(settings, metrics)
    grammars, bodies = GrammarChecker(), BodyPool({"messages": MAX_MESSAGES})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start(on_failure)
        on_start()
        preparing = asyncio.create_task(prepare(endpoints.prompts, on_failure))
        yield
        preparing.cancel()
        await engine.stop()
        await endpoints.pictures.close()
        if corpora is not None:
            await corpora.close()
        await asyncio.to_thread(grammars.close)
        await asyncio.to_thread(bodies.close)

    app = new_fastapi(bodies, lifespan)
    app.state.engine = engine
    quotas = new_quotas(settings, metrics, engine)
    equip(app, settings, metrics, quotas, read_metrics or metrics.read)
    corpora = new_corpora(settings, tokenizer, engine, metrics)
    endpoints = create_endpoints(settings, tokenizer, engine, grammars, metrics, quotas, corpora)
    add_routes(app, endpoints, corpora)
    app.include_router(new_responses_router(endpoints.store))
    app.include_router(new_encoder_refusals(settings.model.served_name))
    app.include_router(new_models_router(ServedModel(settings.model, endpoints.models)))
    add_status_routes(app, engine)
    return app


async def prepare(prompts: PromptEncoder, on_failure: Callable[[str], None]) -> None:
    """Prepares to encode prompts while the worker reads weights."""
    try:
        await prompts.prepare()
    except ModelError as error:
        on_failure(str(error))


def new_fastapi(bodies: BodyPool, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """An application without routes, whose errors have the API's format."""
    app = FastAPI(
        title="Outrider",
        version=version("outrider"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
    )
    app.openapi = lambda: errors.described(FastAPI.openapi(app))  # type: ignore[method-assign]
    app.state.bodies = bodies
    errors.install(app)
    return app


def new_corpora(
    settings: Settings, tokenizer: AnyTokenizer, engine: EngineLike, metrics: Metrics, usage: Usage | None = None
) -> Corpora | None:
    """The corpora that clients post; None if the settings or the engine do not allow any. `usage`: as `Corpora`."""
    if not (settings.corpora.total_bytes and engine.shares_files):
        return None
    return Corpora(settings, lambda: fingerprint(tokenizer), len(tokenizer), metrics, usage)


def add_routes(app: FastAPI, endpoints: Endpoints, corpora: Corpora | None) -> None:
    api = APIRouter(route_class=JSONRoute)

    @api.post("/v1/chat/completions")
    async def chat(http: Request, body: ChatBody) -> Response:
        return await cancel_on_disconnect(http, endpoints.chat.create(http, body))

    @api.post("/v1/completions")
    async def completions(http: Request, body: CompletionBody) -> Response:
        return await cancel_on_disconnect(http, endpoints.completions.create(http, body))

    @api.post("/v1/responses")
    async def responses(http: Request, body: ResponsesBody) -> Response:
        return await cancel_on_disconnect(http, endpoints.responses.create(http, body))

    @api.post("/v1/messages")
    async def messages(http: Request, body: MessagesBody) -> Response:
        return await cancel_on_disconnect(http, endpoints.messages.create(http, body))

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request, body: CountTokensBody) -> Response:
        return await endpoints.messages.count_tokens(http, body)

    @api.get("/v1/models")
    async def models(client_version: str | None = None) -> dict[str, Any]:
        return endpoints.models.list(client_version)

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return endpoints.models.retrieve(name)

    @api.post("/tokenize")
    async def tokenize(http: Request, body: TokenizeBody) -> dict[str, Any]:
        return await endpoints.models.tokenize(http, body)

    @api.post("/detokenize")
    async def detokenize(http: Request, body: DetokenizeBody) -> dict[str, Any]:
        return await endpoints.models.detokenize(http, body)

    @api.post("/infill")
    async def infill(http: Request, body: InfillBody) -> Response:
        return await cancel_on_disconnect(http, endpoints.infill.create(http, body))

    app.include_router(api)
    app.include_router(new_generation_router(endpoints.ollama))
    if corpora is not None:
        app.include_router(new_corpora_router(corpora, endpoints.prompts))


def create_endpoints(
    settings: Settings,
    tokenizer: AnyTokenizer,
    engine: EngineLike,
    grammars: GrammarChecker,
    metrics: Metrics,
    quotas: QuotaKeeper,
    corpora: Corpora | None = None,
    store: ResponseStore | None = None,
) -> Endpoints:
    """The endpoints, with everything that they share. `store`: of responses, if it is not theirs alone. Raises ModelError."""
    model = settings.model
    with loading(f"The model at {model.path!r}"):
        load = partial(load_tokenizer, model.path, model.trust_remote_code, model.revision)
        prompts, vocabulary = PromptEncoder(tokenizer, load), Vocabulary(tokenizer)
        sampling_defaults = NO_DEFAULTS
        if model.generation_config == "auto":
            sampling_defaults = load_sampling_defaults(model.path, model.revision)
        block = no_corpus if corpora is None else corpora.block
        requests = RequestBuilder(settings, prompts, engine.wait_started, quotas.charge, sampling_defaults, block)
        runner = GenerationRunner(engine, metrics, settings.server.coalesce_ms / 1e3, KEEP_ALIVE_SECONDS, model.served_name)
        pictures = PictureService(settings)
        chat = ChatEndpoint(settings, prompts, vocabulary, grammars, requests, runner, pictures)
        names = ModelNames(settings.model)
        completions = CompletionsEndpoint(prompts, vocabulary, grammars, requests, runner)
        store = store or new_store(len(settings.auth.keys))
        return Endpoints(
            chat=chat,
            completions=completions,
            responses=ResponsesEndpoint(chat, vocabulary, store, runner),
            models=ModelEndpoint(
                names, prompts, engine.wait_started, lambda: engine.info, sampling_defaults, chat.capabilities
            ),
            messages=MessagesEndpoint(settings, prompts, chat, runner),
            infill=InfillEndpoint(completions),
            ollama=OllamaEndpoint(settings, names, chat, completions),
            prompts=prompts,
            pictures=pictures,
            store=store,
        )


def equip(
    app: FastAPI, settings: Settings, metrics: Metrics, quotas: QuotaKeeper, read_metrics: Callable[[], Awaitable[bytes]]
) -> None:
    """Adds what every server has beside its models: middleware, the playground, and the metrics with their page."""
    app.state.metrics, app.state.metrics_page = metrics, MetricsPage(settings, read_metrics)
    add_middleware(app, settings, metrics, quotas)
    if settings.server.page:
        from outrider.server.page.routes import new_router  # a server without the page does not load it

        app.include_router(new_router())
    if settings.metrics.port is None:
        add_metrics_route(app, app.state.metrics_page)


def add_middleware(app: FastAPI, settings: Settings, metrics: Metrics, quotas: QuotaKeeper) -> None:
    """Adds the middleware; the last one added is the outermost. Call it after the error handlers are installed."""
    app.add_middleware(HeadRequests)
    app.add_middleware(BodyLimit, limit_bytes=settings.limits.body_bytes, limit_seconds=READ_SECONDS)
    app.add_middleware(HoldQuota, quotas=quotas)
    app.add_middleware(Authenticator, keys=settings.auth.keys)
    app.add_middleware(OriginGuard, settings=settings.server, has_keys=bool(settings.auth.keys))
    # The application's own error handling is outside of all middleware (unexpected errors) or inside of it (the others). Errors
    # of the middleware above are answered here, where the response still gets its headers, is counted and logged.
    handlers = dict(app.exception_handlers)
    unexpected = handlers.pop(Exception)
    app.add_middleware(ExceptionMiddleware, handlers=handlers)
    app.add_middleware(ServerErrorMiddleware, handler=unexpected)
    if settings.server.cors_origins:
        origins = list(settings.server.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RecordRequests, metrics=metrics, settings=settings.logging)
    tracing.install(app, settings.tracing)
    app.add_middleware(ResponseHeaders)
    if settings.server.path_prefix is not None:
        app.add_middleware(PathPrefix, prefix=settings.server.path_prefix)
        app.servers = [{"url": settings.server.path_prefix}]


def add_status_routes(app: FastAPI, engine: EngineLike) -> None:
    """/health, /ready and /version, which need no key."""

    @app.get("/health")
    @app.get("/v1/health")  # llama-server's
    async def health() -> Response:
        if engine.failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "detail": engine.failure}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        if engine.ready:
            return JSONResponse({"status": engine.state})
        return JSONResponse({"status": engine.state, "detail": engine.failure}, 503)

    @app.get("/version")
    async def app_version() -> dict[str, Any]:
        versions: dict[str, Any] = {"version": version("outrider")}
        if engine.info is not None:
            info = engine.info
            versions |= {"dtype": info.dtype, "weight_bits": info.weight_bits, "kv_dtype": info.kv_dtype}
            versions["invariant_rows"] = info.invariance
            versions["memory"] = msgspec.to_builtins(info.memory)
            if info.kernels:
                versions["kernels"] = info.kernels
            if info.alone:
                versions["rows_in_one_thread"] = info.alone
        return versions
