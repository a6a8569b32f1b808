"""A model in memory: its worker or its encoder, and the application of its routes, which the dispatcher calls."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies import models as dependencies
from prometheus_client import CollectorRegistry

from outrider.server.app import add_routes, create_endpoints, new_corpora, new_fastapi
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.corpora.routes import new_reading_router
from outrider.server.corpora.shelves import FOLDER, Shelves, Usage, stored
from outrider.server.encoders.kind import Kind, kind_of
from outrider.server.encoders.routes import new_router
from outrider.server.encoders.service import EncoderService
from outrider.server.engine.engine import Engine, WorkerLost
from outrider.server.http.json_route import BodyPool
from outrider.server.http.quotas import QuotaKeeper
from outrider.server.models.catalog import Entry
from outrider.server.ollama.embed import new_embed_router
from outrider.server.openai.responses.store import ResponseStore
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import EncoderMetrics, Metrics
from outrider.verify.errors import ModelError


@dataclass(frozen=True)
class Shared:
    settings: Settings
    grammars: GrammarChecker
    bodies: BodyPool
    quotas: QuotaKeeper
    store: ResponseStore  # of responses, which any model may continue
    usage: Usage  # of the corpora of all models


@dataclass(frozen=True, eq=False)
class Served:
    kind: Kind | None  # the task of an encoder; None for a model that writes text
    app: FastAPI  # of its routes
    registry: CollectorRegistry  # of its metrics
    engine: Engine | EncoderService
    card: Callable[[], dict[str, Any]]  # its entry in /v1/models
    closed_with_it: Sequence[Callable[[], Awaitable[None]]] = ()

    @property
    def failure(self) -> str | None:
        """Why it does not serve any more, one sentence."""
        return self.engine.failure

    def drain(self) -> None:
        """Refuses new requests from now on; accepted ones continue."""
        self.engine.drain()

    def abort(self) -> None:
        self.engine.abort()

    async def stop(self) -> None:
        """Unloads it. Its sessions are saved."""
        await self.engine.stop()
        for close in self.closed_with_it:
            await close()
        for each in vars(dependencies).values():  # FastAPI's caches would keep the endpoints of the application
            if hasattr(each, "cache_clear"):
                each.cache_clear()


async def load(entry: Entry, shared: Shared) -> Served:
    """Starts the model's process, and waits until it serves. Raises EngineError."""
    model = entry.settings.model
    kind = await asyncio.to_thread(kind_of, model.path, model.revision, download=True)
    return await (load_model(entry, shared) if kind is None else load_encoder(entry, shared, kind))


async def load_encoder(entry: Entry, shared: Shared, kind: Kind) -> Served:
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
    return Served(kind, app, metrics.registry, service, service.card)


async def load_model(entry: Entry, shared: Shared) -> Served:
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
    closed_with_it = [endpoints.pictures.close, *([] if corpora is None else [corpora.close])]
    loaded = Served(None, app, metrics.registry, engine, endpoints.models.card, closed_with_it)
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
