"""Loads models on use, one at a time; unloads the least recently used idle one for room, and any after its idle time.

Promises that a model with a running request is never unloaded, that requests for a loaded model do not wait for another one to
load, and that a model which cannot be loaded fails its own requests only.
"""

import asyncio
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from outrider.server.encoders.kind import Kind
from outrider.server.engine.engine import ShuttingDown
from outrider.server.http.errors import APIError, shortened
from outrider.server.models.catalog import Entry
from outrider.server.models.loaded import Served
from outrider.server.settings.models import NAME_CHARACTERS

log = logging.getLogger("outrider")
# A worker takes this much in addition to its weights, whose packed form is a little larger than their file.
WORKER_BYTES, PACKED_SHARE = 600 << 20, 1.2
# A request waits this long for other models' requests to end, if only their memory is enough.
ROOM_SECONDS = 120.0
IDLE_CHECK_SECONDS = 1.0
DOES: dict[Kind | None, str] = {None: "writes text", "embeddings": "makes embeddings", "rerank": "ranks documents"}


@dataclass(eq=False)
class Model:
    entry: Entry
    loaded: Served | None = None
    loading: asyncio.Task[Served] | None = None
    users: int = 0  # requests that run or wait
    used_at: float = 0.0  # time.monotonic() of the end of the last one
    idle_seconds: float = math.inf  # without a request, after which it is unloaded

    @property
    def kind(self) -> Kind | None:
        """The task of an encoder; None for a model that writes text, or that is not known yet."""
        return self.entry.kind if self.loaded is None else self.loaded.kind

    @property
    def names(self) -> list[str]:
        return [self.entry.name, *self.entry.settings.model.adapters]

    @property
    def is_known(self) -> bool:
        """Whether `kind` is known. It may not be for a Hugging Face id whose files are not here yet."""
        return self.kind is not None or self.loaded is not None or self.entry.size_bytes is not None

    @property
    def needed_bytes(self) -> int:
        """The memory that loading takes, about."""
        return WORKER_BYTES + int(PACKED_SHARE * (self.entry.size_bytes or 0))


class Pool:
    """All models. Its methods are called on the event loop."""

    def __init__(
        self,
        entries: Iterable[Entry],
        load: Callable[[Entry], Awaitable[Served]],
        free_bytes: Callable[[], int],
        idle_seconds: float | None = None,
    ) -> None:
        """`load` returns a model that serves, or raises EngineError."""
        self.models: dict[str, Model] = {entry.name: Model(entry) for entry in entries}
        self._load, self._free_bytes = load, free_bytes
        self._idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self._changing = asyncio.Lock()  # one model is loaded or unloaded at a time, so that its memory counts for the next
        self._ended = asyncio.Condition()  # notified when a request ends
        self.draining = False  # whether new requests are refused

    def find(self, name: str | None, kind: Kind | None = None) -> Model:
        """The model of this name, or the first with such an adapter or alias; without a name, the one of this kind used last.

        Raises APIError.
        """
        if name is None:
            models = [model for model in self.models.values() if model.kind == kind]
            if not models:
                raise APIError(
                    404, f"No model of this server {DOES[kind]}; add one to models.paths.", "model", "model_not_found"
                )
            return max(models, key=lambda model: (model.loaded is not None, model.used_at))
        if name in self.models:
            return self.models[name]
        for model in self.models.values():
            if model.entry.settings.model.answers_to(name):
                return model
        names = ", ".join(self.models)
        message = f"The model {shortened(name, NAME_CHARACTERS)!r} does not exist; this server has {names}."
        raise APIError(404, message, "model", "model_not_found")

    @asynccontextmanager
    async def use(self, model: Model, idle_seconds: float | None = None) -> AsyncIterator[Served]:
        """The model in memory, where it stays until the end, and then for `idle_seconds`; None = the pool's.

        Raises APIError if there is no room, and what loading raises.
        """
        if self.draining:
            raise ShuttingDown
        model.users += 1
        model.idle_seconds = self._idle_seconds if idle_seconds is None else idle_seconds
        try:
            loaded = model.loaded
            if loaded is None or loaded.failure is not None:
                loaded = await self._loaded(model)
            yield loaded
        finally:
            model.users -= 1
            model.used_at = time.monotonic()
            async with self._ended:
                self._ended.notify_all()

    def drain(self) -> None:
        """Refuses new requests from now on; accepted ones continue."""
        self.draining = True
        for model in self.models.values():
            if model.loaded is not None:
                model.loaded.drain()

    def abort(self) -> None:
        for model in self.models.values():
            if model.loading is not None:
                model.loading.cancel()
            if model.loaded is not None:
                model.loaded.abort()

    async def unload_idle(self) -> None:
        """Unloads models that were not used for their `idle_seconds`; runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(IDLE_CHECK_SECONDS, self._idle_seconds))
            async with self._changing:
                for model in self._idle():
                    if model.used_at + model.idle_seconds <= time.monotonic() and not model.users:
                        await self._unload(model, f"no request for {model.idle_seconds:g} s")

    async def close(self) -> None:
        self.abort()
        await asyncio.gather(*(self._unload(model, "shutdown") for model in self.models.values()))

    async def _loaded(self, model: Model) -> Served:
        """Loads the model, also if the request that asked for it is cancelled meanwhile."""
        if model.loading is None:
            model.loading = asyncio.create_task(self._load_in_turn(model))
            model.loading.add_done_callback(partial(_end_loading, model))
        return await asyncio.shield(model.loading)

    async def _load_in_turn(self, model: Model) -> Served:
        """Loads the model once there is room. Raises APIError if running requests hold the memory for ROOM_SECONDS."""
        deadline = asyncio.get_running_loop().time() + ROOM_SECONDS
        while True:
            async with self._changing:
                if model.loaded is not None and (failure := model.loaded.failure) is not None:
                    await self._unload(model, failure)
                if model.loaded is None and await self._made_room(model):
                    started = time.monotonic()
                    model.loaded = await self._load(model.entry)
                    log.info("loaded %s in %.1f s", model.entry.name, time.monotonic() - started)
                if model.loaded is not None:
                    return model.loaded
            try:  # meanwhile, models that fit are loaded
                async with asyncio.timeout_at(deadline), self._ended:
                    await self._ended.wait_for(self._idle)
            except TimeoutError:
                needed, free = (round(count / 1e9, 1) for count in (model.needed_bytes, self._free_bytes()))
                message = (
                    f"{model.entry.name} needs about {needed} GB, and {free} are free beside models that are answering; "
                    "retry later, or use one of those."
                )
                raise APIError(503, message, code="no_room", retry_seconds=ROOM_SECONDS) from None

    async def _made_room(self, model: Model) -> bool:
        """Unloads idle models until this one fits; False if it does not beside those that are answering."""
        while self._free_bytes() < model.needed_bytes and any(each.loaded is not None for each in self.models.values()):
            idle = self._idle()
            if not idle:
                return False
            await self._unload(idle[0], f"{model.entry.name} needs its memory")
        return True

    def _idle(self) -> list[Model]:
        """Loaded models without requests, the least recently used first."""
        idle = [model for model in self.models.values() if model.loaded is not None and not model.users]
        return sorted(idle, key=lambda model: model.used_at)

    async def _unload(self, model: Model, reason: str) -> None:
        loaded, model.loaded = model.loaded, None
        if loaded is not None:
            log.info("unloading %s: %s", model.entry.name, reason)
            await loaded.stop()
            del loaded
            gc.collect()  # an application has cycles of references, in which a tokenizer's megabytes would wait


def _end_loading(model: Model, task: asyncio.Task[Served]) -> None:
    model.loading = None
    if not task.cancelled():
        task.exception()  # it belongs to the requests that wait, of which there may be none any more
