"""The HTTP application of several models: what belongs to the server, and the dispatcher for all else."""

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import generate_latest

from outrider.server.app import equip, new_fastapi
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.corpora.shelves import Usage
from outrider.server.engine.engine import Engine
from outrider.server.http.exposition import merged
from outrider.server.http.json_route import BodyPool
from outrider.server.http.quotas import Quotas
from outrider.server.http.server import announce, new_server
from outrider.server.models.catalog import Entry
from outrider.server.models.dispatcher import Dispatcher
from outrider.server.models.gate import Gate
from outrider.server.models.loaded import Shared, load, reader_of, settings_of
from outrider.server.models.pool import Model, Pool
from outrider.server.ollama.description import Description
from outrider.server.ollama.routes import new_models_router
from outrider.server.openai.chat import MAX_MESSAGES
from outrider.server.openai.responses.store import new_router as new_responses_router
from outrider.server.openai.responses.store import new_store
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.system_memory import free_bytes


def serve(
    settings: Settings, entries: Collection[Entry], listener: socket.socket, metrics_listener: socket.socket | None = None
) -> int:
    """Serves on the listeners until a signal; returns the exit code."""
    names = ", ".join(entry.name for entry in entries)
    app = create_app(
        settings,
        entries,
        lambda: announce(names, settings.server, listener, metrics_listener, "each is loaded when it is asked for"),
    )
    server = new_server(app, settings, app.state.pool, metrics_listener)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


def create_app(settings: Settings, entries: Iterable[Entry], on_start: Callable[[], None] = lambda: None) -> FastAPI:
    """The application. `app.state` has the pool, and the metrics and their page for the HTTP server."""
    metrics = Metrics()
    grammars, bodies = GrammarChecker(), BodyPool({"messages": MAX_MESSAGES})
    quotas = Quotas(settings.auth, metrics, lambda: seconds_per_request(pool))
    stack = contextlib.ExitStack()
    kept, entries = with_folder(settings, stack), list(entries)
    usage = Usage([folder for entry in entries if (folder := settings_of(entry, kept.sessions.folder).sessions.folder)])
    shared = Shared(kept, grammars, bodies, quotas, new_store(len(settings.auth.keys)), usage)
    pool = Pool(entries, partial(load, shared=shared), free_bytes, settings.models.idle_seconds)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        unloading = asyncio.create_task(pool.unload_idle())
        on_start()
        yield
        unloading.cancel()
        await pool.close()
        await asyncio.to_thread(grammars.close)
        await asyncio.to_thread(bodies.close)
        stack.close()

    async def read_metrics() -> bytes:
        loaded = [(name, generate_latest(model.loaded.registry)) for name, model in pool.models.items() if model.loaded]
        return merged([("", metrics.render()), *loaded], "model")

    app = new_fastapi(bodies, lifespan)
    app.state.pool = pool
    equip(app, settings, metrics, quotas, read_metrics)
    add_model_routes(app, pool)
    app.include_router(new_models_router(PooledModels(pool)))
    app.include_router(new_responses_router(shared.store))
    add_status_routes(app, pool)
    app.router.default = Dispatcher(pool, bodies, Gate(settings, bodies), partial(reader_of, shared=shared))
    return app


def with_folder(settings: Settings, stack: contextlib.ExitStack) -> Settings:
    """The settings with a folder for sessions, which outlive an unload there: a temporary one if none is set."""
    if settings.sessions.folder is not None:
        return settings
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-sessions-")))
    return settings.model_copy(update={"sessions": settings.sessions.model_copy(update={"folder": folder})})


def seconds_per_request(pool: Pool) -> float:
    """The longest mean time of a request among the loaded models."""
    return max((model.loaded.engine.seconds_per_request for model in pool.models.values() if model.loaded), default=1.0)


def add_model_routes(app: FastAPI, pool: Pool) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models(client_version: str | None = None) -> dict[str, Any]:
        catalog: dict[str, Any] = {} if client_version is None else {"models": []}  # for Codex, as of a single model
        data = [card(model, created, name) for model in pool.models.values() for name in model.names]
        return {"object": "list", "data": data, **catalog}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(pool.find(name), created, name)


def card(model: Model, created: int, name: str) -> dict[str, Any]:
    """A model, or its adapter of this name, in /v1/models. Its status has the words of llama-server's router."""
    status = "loaded" if model.loaded else "loading" if model.loading else "unloaded"
    found: dict[str, Any] = {"id": model.entry.name, "object": "model", "created": created, "owned_by": "outrider"}
    if model.loaded is not None:
        found |= model.loaded.card()
    if name in model.entry.settings.model.adapters:
        found |= {"id": name, "parent": model.entry.name}
    return found | {"status": {"value": status}, "size_bytes": model.entry.size_bytes}


@dataclass(frozen=True)
class PooledModels:
    """Implements `outrider.server.ollama.routes.Models`."""

    pool: Pool

    def describe_all(self) -> list[Description]:
        return [self.describe(name) for model in self.pool.models.values() for name in model.names]

    def describe(self, name: str) -> Description:
        model, own = self.pool.find(name), self.pool.find(name).entry.settings.model
        loaded, left = model.loaded, max(0.0, model.used_at + model.idle_seconds - time.monotonic())
        return Description(
            own.adapter(name) or model.entry.name,
            own,
            card={} if loaded is None else loaded.card(),
            size_bytes=model.entry.size_bytes,
            is_loaded=loaded is not None,
            info=loaded.engine.info if loaded is not None and isinstance(loaded.engine, Engine) else None,
            kind=model.kind,
            idle_seconds=model.idle_seconds if model.users else left,
        )


def add_status_routes(app: FastAPI, pool: Pool) -> None:
    """/health, /ready and /version, which need no key. The server is ready before any model is loaded."""

    @app.get("/health")
    @app.get("/v1/health")  # llama-server's
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "draining" if pool.draining else "ready"}

    @app.get("/version")
    async def app_version() -> dict[str, str]:
        return {"version": version("outrider")}
