"""The routes of Ollama's API. Those about models are the same for one model and for several."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response

from outrider.server.http.errors import OLLAMA_PREFIX, APIError
from outrider.server.http.json_route import JSONRoute
from outrider.server.http.sse import cancel_on_disconnect
from outrider.server.ollama.description import Description
from outrider.server.ollama.endpoint import OllamaEndpoint
from outrider.server.ollama.schema import ChatRequest, GenerateRequest, ModelBody

# The version of Ollama whose API this is: clients refuse older servers.
API_VERSION = "0.12.11"


class Models(Protocol):
    def describe_all(self) -> Iterable[Description]:
        """All models and adapters."""

    def describe(self, name: str) -> Description:
        """The model of this name. Raises APIError."""


class AnyTypeRoute(JSONRoute):
    """A route whose body is JSON whatever type it has: curl says by default that it is a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            scope = {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handler(Request(scope, request.receive))

        return handle


def new_router() -> APIRouter:
    return APIRouter(prefix=OLLAMA_PREFIX.rstrip("/"), route_class=AnyTypeRoute)


def new_generation_router(endpoint: OllamaEndpoint) -> APIRouter:
    router = new_router()

    @router.post("/chat")
    async def chat(http: Request, body: ChatRequest) -> Response:
        return await cancel_on_disconnect(http, endpoint.create(http, body))

    @router.post("/generate")
    async def generate(http: Request, body: GenerateRequest) -> Response:
        return await cancel_on_disconnect(http, endpoint.create(http, body))

    return router


def new_models_router(models: Models) -> APIRouter:
    """The routes that tell of models, and those that would change which there are."""
    router = new_router()

    @router.get("/version")
    async def api_version() -> dict[str, str]:
        return {"version": API_VERSION, "outrider": version("outrider")}

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        return await asyncio.to_thread(lambda: {"models": [each.listed() for each in models.describe_all()]})

    @router.get("/ps")
    async def running() -> dict[str, Any]:
        loaded = [each for each in models.describe_all() if each.is_loaded]
        return await asyncio.to_thread(lambda: {"models": [each.running() for each in loaded]})

    @router.post("/show")
    async def show(body: ModelBody) -> dict[str, Any]:
        return await asyncio.to_thread(models.describe(body.model_name).shown)

    @router.post("/pull")
    async def pull(body: ModelBody) -> dict[str, Any]:
        try:
            found = models.describe(body.model_name)
        except APIError as error:
            message = (
                f"{error.message} It downloads none for its clients; run outrider pull where it runs, and serve the model."
            )
            raise APIError(404, message, "model", error.code) from None
        if found.size_bytes is None and not found.is_loaded:
            message = f"{found.name} is downloaded by the first request that it answers; send one, or run outrider pull."
            raise APIError(400, message, "model")
        return {"status": "success"}

    @router.delete("/delete")
    async def delete(body: ModelBody) -> None:
        name = models.describe(body.model_name).name
        raise APIError(400, f"This server deletes no models for its clients; run outrider remove for {name} where it runs.")

    return router
