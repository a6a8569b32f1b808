"""Whether a request is worth loading a model: the routes of all models of a kind, whose endpoints do nothing.

Promises that a path, a method or a body which no model would accept gets the answer of a loaded model, and loads none.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from fastapi import FastAPI, Request, Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from outrider.server.app import add_routes, new_fastapi
from outrider.server.encoders.kind import Kind
from outrider.server.encoders.routes import new_router
from outrider.server.http.json_route import BodyPool
from outrider.server.ollama.embed import new_embed_router
from outrider.server.settings import Settings

KINDS: tuple[Kind | None, ...] = (None, "embeddings", "rerank")


class Arrived(Exception):
    """A request has reached an endpoint, so its path, its method and its body are valid."""


class Endpoint(SimpleNamespace):
    """Stands for whatever answers requests."""

    def __getattr__(self, name: str) -> Endpoint:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise Arrived


class Gate:
    """The routes of models that write text, and of encoders."""

    def __init__(self, settings: Settings, bodies: BodyPool) -> None:
        self._apps = {kind: new_gate(settings, bodies, kind) for kind in KINDS}

    def has_route(self, scope: Scope, kind: Kind | None) -> bool:
        """Whether there is an endpoint for the path and the method."""
        routes: Iterable[Any] = self._apps[kind].router.routes
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    async def admits(self, scope: Scope, receive: Receive, send: Send, kind: Kind | None) -> bool:
        """Whether an endpoint would get the request; sends the answer if not."""
        admitted = False

        async def send_error(message: Message) -> None:
            nonlocal admitted
            if message["type"] == "http.response.start":
                admitted = message["status"] < 400
                scope["route"] = tried.get("route")
            if not admitted:
                await send(message)

        tried = dict(scope)
        await self._apps[kind](tried, receive, send_error)
        return admitted


def new_gate(settings: Settings, bodies: BodyPool, kind: Kind | None) -> FastAPI:
    """The application of all models of a kind, which answers a valid request with a 204."""
    app, endpoint = new_fastapi(bodies), Endpoint()
    if kind is None:
        add_routes(app, cast(Any, endpoint), cast(Any, endpoint) if settings.corpora.total_bytes else None)
    else:
        service = cast(Any, SimpleNamespace(kind=kind, loaded=endpoint, embed=endpoint, score=endpoint))
        app.include_router(new_router("", service))
        app.include_router(new_embed_router("", service))

    @app.exception_handler(Arrived)
    async def arrived(_: Request, __: Arrived) -> Response:
        return Response(status_code=204)

    return app
