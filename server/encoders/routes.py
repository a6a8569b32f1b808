"""/v1/embeddings, as in OpenAI's API, and /v1/rerank, as in Cohere's and Jina's."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from outrider.server.encoders.service import EncoderService
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import JSONRoute, in_turn, turn_of
from outrider.server.http.sse import cancel_on_disconnect
from outrider.server.openai.fields import Body
from outrider.server.telemetry.gen_ai import models

# OpenAI's limit.
MAX_TEXTS = 2048
MAX_DIMENSIONS = 1 << 16


def check_input(value: Any) -> Any:
    """A text or a list, as a list. Raises PydanticCustomError for token ids."""
    if isinstance(value, str):
        return [value]
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list) or (isinstance(first, int) and not isinstance(first, bool)):
        message = "token ids are not accepted, because they may belong to another tokenizer; send text"
        raise PydanticCustomError("token_ids", message)
    return value


def text_of(value: Any) -> Any:
    """The text of a document that is an object, as in Cohere's and Jina's APIs."""
    return value["text"] if isinstance(value, dict) and isinstance(value.get("text"), str) else value


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS), BeforeValidator(check_input)]
Document = Annotated[str, BeforeValidator(text_of)]


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    # Models that were trained with a prompt for queries and another one for documents use it.
    input_type: Literal["query", "document"] | None = None


class RerankBody(Body):
    """POST /v1/rerank."""

    model: str | None = None
    query: Text
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False


# A number of a vector in JSON, about.
NUMBER_BYTES = 12


def new_router(name: str, service: EncoderService) -> APIRouter:
    """The routes of what an encoder does. `name` is the model's."""
    router = APIRouter(route_class=JSONRoute)
    if service.kind == "embeddings":

        @router.post("/v1/embeddings")
        async def embeddings(http: Request, body: EmbeddingsBody) -> Response:
            return await cancel_on_disconnect(http, embed(http, body, name, service))

    else:

        @router.post("/v1/rerank")
        @router.post("/v2/rerank")  # Cohere's client
        @router.post("/rerank")  # vLLM's and llama-server's further name
        async def rerank(http: Request, body: RerankBody) -> Response:
            return await cancel_on_disconnect(http, score(http, body, name, service))

    return router


def new_refusals(name: str) -> APIRouter:
    """The same routes of a server whose only model writes text."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    @router.post("/api/embed")
    @router.post("/api/embeddings")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    @router.post("/rerank")
    async def refuse() -> None:
        message = f"{name} writes text; this endpoint needs an encoder among several models, see docs/encoders.md."
        raise APIError(404, message, "model", "model_not_found")

    return router


async def embed(http: Request, body: EmbeddingsBody, name: str, service: EncoderService) -> Response:
    """The answer to POST /v1/embeddings. Raises APIError and EngineError."""
    vectors, tokens = await vectors_of(http, body, name, service)

    def content() -> bytes:
        in_base64 = body.encoding_format == "base64"
        encoded = (base64.b64encode(each.tobytes()).decode() if in_base64 else each.tolist() for each in vectors)
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)]
        return msgspec.json.encode({"object": "list", "data": data, "model": name, "usage": usage(tokens, service)})

    written = await in_turn(http, content, vectors.size * NUMBER_BYTES)
    response = Response(written, media_type="application/json")
    return report_ignored(http, response, cut_texts("input", body.input, tokens, service))


async def vectors_of(
    http: Request, body: EmbeddingsBody, name: str, service: EncoderService
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """The vectors of a body's texts, float32 [N, D], and the tokens of each. Raises APIError and EngineError."""
    most = service.loaded.dimensions
    if body.dimensions is not None and most is not None and body.dimensions > most:
        raise APIError(400, f"Invalid 'dimensions': {name} has {most}.", "dimensions", "invalid_value")
    values, tokens = await service.embed(turn_of(http), body.input, body.input_type, body.dimensions)
    http.state.stats = {"prompt_tokens": usage(tokens, service)["prompt_tokens"]}
    http.state.gen_ai = models(name)
    return np.frombuffer(values, "<f4").reshape(len(body.input), -1), tokens


async def score(http: Request, body: RerankBody, name: str, service: EncoderService) -> Response:
    """The answer to POST /v1/rerank: the documents by descending score. Raises APIError and EngineError."""
    scores, tokens = await service.score(turn_of(http), body.query, body.documents)
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: body.top_n]

    def result(index: int) -> dict[str, Any]:
        document = {"document": {"text": body.documents[index]}} if body.return_documents else {}
        return {"index": index, "relevance_score": scores[index], **document}

    def content() -> bytes:
        return msgspec.json.encode(
            {"object": "list", "model": name, "results": [*map(result, best)], "usage": usage(tokens, service)}
        )

    response = Response(await in_turn(http, content), media_type="application/json")
    cut = cut_texts("documents", body.documents, tokens, service)
    return report_ignored(http, response, [*(["query"] if is_long(body.query, service) else []), *cut])


def usage(tokens: Sequence[int], service: EncoderService) -> dict[str, int]:
    """The tokens that were read for a request."""
    limit = service.loaded.max_tokens
    count = sum(tokens) if limit is None else sum(min(each, limit) for each in tokens)
    return {"prompt_tokens": count, "total_tokens": count}


def cut_texts(field: str, texts: Sequence[str], tokens: Sequence[int], service: EncoderService) -> list[str]:
    """Names for the header: texts of which only the beginning was read, by index."""
    limit = service.loaded.max_tokens
    return [
        f"{field}.{index}"
        for index, (text, count) in enumerate(zip(texts, tokens, strict=True))
        if (limit is not None and count > limit) or is_long(text, service)
    ]


def is_long(text: str, service: EncoderService) -> bool:
    """Whether a text was cut before it was tokenized."""
    return service.read_characters is not None and len(text) > service.read_characters
