"""A model in memory: its worker, and the application of its routes, which the dispatcher calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from outrider.server.app import Endpoints, add_routes, create_endpoints, new_corpora, new_fastapi
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.corpora.registry import Corpora
from outrider.server.engine.engine import Engine, WorkerLost
from outrider.server.http.json_route import BodyPool
from outrider.server.http.quotas import QuotaKeeper
from outrider.server.models.catalog import Entry
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.errors import ModelError
from outrider.verify.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Shared:
    """What all models share."""

    settings: Settings
    grammars: GrammarChecker
    bodies: BodyPool
    quotas: QuotaKeeper


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Implements `outrider.server.models.pool.Loaded`."""

    app: FastAPI
    engine: Engine
    endpoints: Endpoints
    metrics: Metrics
    corpora: Corpora | None

    @property
    def failure(self) -> str | None:
        """As `Loaded`."""
        return self.engine.failure

    def drain(self) -> None:
        """As `Loaded`."""
        self.engine.drain()

    def abort(self) -> None:
        """As `Loaded`."""
        self.engine.abort()

    async def stop(self) -> None:
        """As `Loaded`."""
        await self.engine.stop()
        if self.corpora is not None:
            await self.corpora.close()


async def load(entry: Entry, shared: Shared) -> LoadedModel:
    """Starts the model's worker, and waits until it serves. Raises EngineError."""
    settings = settings_of(entry, shared.settings.sessions.folder)
    model = settings.model
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, model.path, model.trust_remote_code, model.revision)
    except ModelError as error:
        raise WorkerLost(str(error)) from None
    metrics = Metrics(coarse=settings.server.coalesce_ms > 0)
    engine, app = Engine(settings, metrics), new_fastapi(shared.bodies)
    corpora = new_corpora(settings, tokenizer, engine, metrics)
    endpoints = create_endpoints(settings, tokenizer, engine, shared.grammars, metrics, shared.quotas, corpora)
    add_routes(app, endpoints, corpora)
    loaded = LoadedModel(app, engine, endpoints, metrics, corpora)
    await engine.start(lambda _: None)  # `wait_started` raises what it would say
    try:
        await engine.wait_started()
    except BaseException:
        await asyncio.shield(loaded.stop())
        raise
    return loaded


def settings_of(entry: Entry, sessions: Path | None) -> Settings:
    """The settings of one model. Its sessions and corpora have a folder of their own in that of all `sessions`."""
    model = entry.settings.model.model_copy(update={"name": entry.name})
    own = entry.settings.sessions.model_copy(update={"folder": sessions and sessions / entry.name})
    return entry.settings.model_copy(update={"model": model, "sessions": own})
