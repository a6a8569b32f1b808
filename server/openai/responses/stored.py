"""The routes of stored responses, which need no model: a response is found whichever model wrote it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from outrider.server.http.errors import APIError
from outrider.server.openai.responses.store import ResponseStore


def new_router(store: ResponseStore) -> APIRouter:
    """/v1/responses/{identity}."""
    router = APIRouter(prefix="/v1/responses/{identity}")

    @router.get("")
    async def response(http: Request, identity: str) -> Response:
        return Response(store.get(identity, http.state.principal).content, media_type="application/json")

    @router.delete("")
    async def forget(http: Request, identity: str) -> dict[str, Any]:
        store.delete(identity, http.state.principal)
        return {"id": identity, "object": "response", "deleted": True}

    @router.post("/cancel")
    async def cancel(http: Request, identity: str) -> dict[str, Any]:
        store.get(identity, http.state.principal)  # it is finished, and there are no background responses
        message = "Only background responses can be cancelled; to cancel any other, close its connection."
        raise APIError(400, message, "response_id")

    return router
