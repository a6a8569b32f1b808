"""A model in memory: its worker or its encoder, and the application of its routes, which the dispatcher calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fastapi import FastAPI
from fastapi.dependencies import models as dependencies
from prometheus_client import CollectorRegistry

from outrider.server.app import Endpoints, add_routes, create_endpoints, new_corpora, new_fastapi
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.corpora.registry import Corpora
from outrider.server.corpora.routes import new_reading_router
from outrider.server.corpora.shelves import FOLDER, Shelves, Usage, stored
from outrider.server.encoders.kind import Kind, kind_of
from outrider.server.encoders.routes import new_router
from outrider.server.encoders.service import EncoderService
from outrider.server.engine.engine import Engine, WorkerLost
from outrider.server.engine.messages import Ready
from outrider.server.http.json_route import BodyPool
from outrider.server.http.quotas import QuotaKeeper
from outrider.server.models.catalog import Entry
from outrider.server.models.pool import Loaded
from outrider.server.ollama.embed import new_embed_router
from outrider.server.openai.responses.store import ResponseStore
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import EncoderMetrics, Metrics
from outrider.verify.errors import ModelError


@dataclass(frozen=True)
class Shared:
    """Objects that all models share."""

    settings: Settings
    grammars: GrammarChecker
    bodies: BodyPool
    quotas: QuotaKeeper
    store: ResponseStore  # of responses, which any model may continue
    usage: Usage  # of the corpora of all models


class Served(Loaded, Protocol):
    """A model in memory, with what the server shows of it."""

    @property
    def info(self) -> Ready | None:
        """The properties of its worker."""

    @property
    def app(self) -> FastAPI:
        """The application of its routes."""

    @property
    def registry(self) -> CollectorRegistry:
        """Its metrics."""

    @property
    def seconds_per_request(self) -> float:
        """The mean time of a request."""

    @property
    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that writes text. Implements `Served`."""

    kind: ClassVar[Kind | None] = None
    app: FastAPI
    engine: Engine
    endpoints: Endpoints
    registry: CollectorRegistry
    corpora: Corpora | None

    @property
    def seconds_per_request(self) -> float:
        """See `Served`."""
        return self.engine.seconds_per_request

    @property
    def info(self) -> Ready | None:
        """See `Served`."""
        return self.engine.info

    @property
    def card(self) -> dict[str, Any]:
        """See `Served`."""
        return self.endpoints.models.card

    @property
    def failure(self) -> str | None:
        """See `Loaded`."""
        return self.engine.failure

    def drain(self) -> None:
        """See `Loaded`."""
        self.engine.drain()

    def abort(self) -> None:
        """See `Loaded`."""
        self.engine.abort()

    async def stop(self) -> None:
        """See `Loaded`."""
        await self.engine.stop()
        await self.endpoints.pictures.close()
        if self.corpora is not None:
            await self.corpora.close()
        forget_routes()


@dataclass(frozen=True, eq=False)
class LoadedEncoder:
    """A model that encodes texts. Implements `Served`."""

    seconds_per_request: ClassVar[float] = 1.0
    info: ClassVar[Ready | None] = None
    failure: ClassVar[str | None] = None  # a process that ends is started again
    app: FastAPI
    service: EncoderService
    registry: CollectorRegistry

    @property
    def kind(self) -> Kind | None:
        """See `Loaded`."""
        return self.service.kind

    @property
    def card(self) -> dict[str, Any]:
        """See `Served`."""
        tokens, dimensions = self.service.loaded.max_tokens, self.service.loaded.dimensions
        return {
            "max_model_len": tokens,
            "context_length": tokens,
            "capabilities": [self.service.kind],
            **({} if dimensions is None else {"dimensions": dimensions}),
        }

    def drain(self) -> None:
        """See `Loaded`. The pool refuses new requests."""

    def abort(self) -> None:
        """See `Loaded`."""
        self.service.abort()

    async def stop(self) -> None:
        """See `Loaded`."""
        await self.service.stop()
        forget_routes()


async def load(entry: Entry, shared: Shared) -> Served:
    """Starts the model's process, and waits until it serves. Raises EngineError."""
    model = entry.settings.model
    kind = await asyncio.to_thread(kind_of, model.path, model.revision, download=True)
    return await (load_model(entry, shared) if kind is None else load_encoder(entry, shared, kind))


async def load_encoder(entry: Entry, shared: Shared, kind: Kind) -> LoadedEncoder:
    """An encoder. Raises EngineError."""
    metrics, app = EncoderMetrics(), new_fastapi(shared.bodies)
    service = EncoderService(entry.settings, kind, metrics)
    app.include_router(new_router(entry.name, service))
    app.include_router(new_embed_router(entry.name, service))
    try:
        await service.start()
    except BaseException:
        await asyncio.shield(service.stop())
        raise
    return LoadedEncoder(app, service, metrics.registry)


async def load_model(entry: Entry, shared: Shared) -> LoadedModel:
    """A model that writes text. Raises EngineError."""
    settings = settings_of(entry, shared.settings.sessions.folder)
    metrics = Metrics(coarse=settings.server.coalesce_ms > 0)
    engine, app = Engine(settings, metrics), new_fastapi(shared.bodies)
    try:
        tokenizer = await asyncio.to_thread(load_tried_tokenizer, settings)
        corpora = new_corpora(settings, tokenizer, engine, metrics, shared.usage)
        endpoints = create_endpoints(
            settings, tokenizer, engine, shared.grammars, metrics, shared.quotas, corpora, shared.store
        )
    except ModelError as error:
        raise WorkerLost(str(error)) from None
    add_routes(app, endpoints, corpora)
    loaded = LoadedModel(app, engine, endpoints, metrics.registry, corpora)
    await engine.start(lambda _: None)  # `wait_started` raises what it would say
    try:
        await asyncio.gather(endpoints.prompts.prepare(), engine.wait_started())
    except BaseException as error:
        await asyncio.shield(loaded.stop())
        raise (WorkerLost(str(error)) if isinstance(error, ModelError) else error) from None
    return loaded


def reader_of(entry: Entry, shared: Shared) -> FastAPI:
    """An application that tells of the corpora of a model that is not loaded. Reads files."""
    folder = settings_of(entry, shared.settings.sessions.folder).sessions.folder
    app = new_fastapi(shared.bodies)
    app.include_router(new_reading_router(stored(folder.expanduser() / FOLDER) if folder else Shelves()))
    return app


def settings_of(entry: Entry, sessions: Path | None) -> Settings:
    """The settings of one model. Its sessions and corpora have a folder of their own within `sessions`."""
    model = entry.settings.model.model_copy(update={"name": entry.name})
    own = entry.settings.sessions.model_copy(update={"folder": sessions and sessions / entry.name})
    return entry.settings.model_copy(update={"model": model, "sessions": own})


def forget_routes() -> None:
    """Empties FastAPI's caches of the functions of routes, which would keep the endpoints of an application that is gone."""
    for each in vars(dependencies).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
