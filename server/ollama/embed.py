"""POST /api/embed, and its older form /api/embeddings. A text that is too long is cut, and a header of the answer names it."""

import time
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from outrider.server.encoders.routes import NUMBER_BYTES, EmbeddingsBody, Text, cut_texts, usage, vectors_of
from outrider.server.encoders.service import EncoderService
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.http.sse import cancel_on_disconnect
from outrider.server.ollama.endpoint import DISPATCHED
from outrider.server.ollama.formatter import nanoseconds
from outrider.server.ollama.routes import new_router
from outrider.server.openai.fields import Body


class PromptBody(Body):
    """POST /api/embeddings."""

    model: str | None = None
    prompt: Text


def new_embed_router(name: str, service: EncoderService) -> APIRouter:
    """The routes of an encoder; none unless it makes embeddings."""
    router = new_router()
    if service.kind != "embeddings":
        return router

    @router.post("/embed")
    async def embed(http: Request, body: EmbeddingsBody) -> Response:
        started = time.monotonic()

        def content(vectors: np.ndarray[Any, Any], tokens: list[int]) -> dict[str, Any]:
            total = nanoseconds(time.monotonic() - started)
            loading = nanoseconds(started - http.scope.get(DISPATCHED, started))
            counted = {"load_duration": loading, "prompt_eval_count": usage(tokens, service)["prompt_tokens"]}
            return {"model": body.model or name, "embeddings": vectors.tolist(), "total_duration": total, **counted}

        return await cancel_on_disconnect(http, respond(http, body, content))

    @router.post("/embeddings")
    async def embeddings(http: Request, body: PromptBody) -> Response:
        texts = EmbeddingsBody(model=body.model, input=[body.prompt])
        return await cancel_on_disconnect(http, respond(http, texts, lambda vectors, _: {"embedding": vectors[0].tolist()}))

    async def respond(http: Request, body: EmbeddingsBody, content: Any) -> Response:
        vectors, tokens = await vectors_of(http, body, name, service)
        size_bytes = vectors.size * NUMBER_BYTES
        written = await in_turn(http, lambda: msgspec.json.encode(content(vectors, tokens)), size_bytes)
        return report_ignored(
            http, Response(written, media_type="application/json"), cut_texts("input", body.input, tokens, service)
        )

    return router
