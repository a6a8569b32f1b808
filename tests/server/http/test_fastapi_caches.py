"""An application that is gone leaves nothing of its endpoints behind."""

from __future__ import annotations

import gc
import weakref

from fastapi import FastAPI
from fastapi.testclient import TestClient

from outrider.server.http.fastapi_caches import forget_routes


class Endpoint:
    """What a route's function refers to."""

    def answer(self) -> str:
        return "yes"


def serve() -> weakref.ref[Endpoint]:
    app, endpoint = FastAPI(), Endpoint()

    @app.get("/")
    async def route() -> str:
        return endpoint.answer()

    assert TestClient(app).get("/").json() == "yes"
    return weakref.ref(endpoint)


def test_endpoints_are_freed() -> None:
    endpoint = serve()
    forget_routes()
    gc.collect()
    assert endpoint() is None
