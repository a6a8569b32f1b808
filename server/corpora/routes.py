"""The routes of corpora and their bodies."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Field

from outrider.server.chat.prompt import PromptEncoder
from outrider.server.corpora.messages import DOCUMENT_BYTES, Listing
from outrider.server.corpora.registry import Corpora
from outrider.server.corpora.shelves import Shelves, short_digest
from outrider.server.http.json_route import JSONRoute, in_turn, turn_of
from outrider.server.openai.fields import MAX_ENTRIES, Body

NAME_CHARACTERS = 64
PATH_CHARACTERS = 1024


def check_name(name: str) -> str:
    """The name, if it is one. It is also the name of a folder. Raises ValueError."""
    known = name.isascii() and all(character.isalnum() or character in "._-" for character in name)
    if not (known and 0 < len(name) <= NAME_CHARACTERS and name[0].isalnum()):
        raise ValueError(
            f"a corpus's name has 1 to {NAME_CHARACTERS} letters, digits, '.', '_' and '-', and begins with a letter or digit"
        )
    return name


CorpusName = Annotated[str, AfterValidator(check_name)]
Path = Annotated[str, Field(min_length=1, max_length=PATH_CHARACTERS)]
Texts = Annotated[list[str], Field(max_length=MAX_ENTRIES, fail_fast=True)]


class File(Body):
    """A text with a path, which is only a name: no file of the server is read."""

    path: Path
    text: str


class CorpusBody(Body):
    """POST /v1/outrider/corpora: texts that are added to a corpus."""

    name: CorpusName
    files: Annotated[list[File], Field(max_length=MAX_ENTRIES, fail_fast=True)] | None = None
    texts: Texts | None = None
    remove: Annotated[list[Path], Field(max_length=MAX_ENTRIES, fail_fast=True)] | None = None
    default: bool | None = None  # whether requests that choose no corpus use this one; null = as before


def new_router(corpora: Corpora, prompts: PromptEncoder) -> APIRouter:
    router = new_reading_router(corpora)

    @router.post("/v1/outrider/corpora")
    async def post(http: Request, body: CorpusBody) -> dict[str, Any]:
        started = time.perf_counter()
        texts = await in_turn(http, lambda: {each.path: each.text for each in body.files or ()} | unnamed(body.texts or ()))
        encode = partial(prompts.documents, http.state.principal)
        corpus = await corpora.change(turn_of(http), body.name, texts, body.remove or (), encode, body.default)
        return {**card(corpora, http, corpus), "seconds": round(time.perf_counter() - started, 3)}

    @router.delete("/v1/outrider/corpora/{name}")
    async def delete(http: Request, name: str) -> dict[str, Any]:
        await corpora.delete(turn_of(http), name)
        return {"object": "corpus", "name": name, "deleted": True}

    return router


def new_reading_router(corpora: Shelves) -> APIRouter:
    """The routes that change nothing, and so need no model."""
    router = APIRouter(route_class=JSONRoute)

    @router.get("/v1/outrider/corpora")
    async def list_all(http: Request) -> dict[str, Any]:
        return {"object": "list", "data": [card(corpora, http, corpus) for corpus in corpora.of(turn_of(http)).values()]}

    @router.get("/v1/outrider/corpora/{name}")
    async def get(http: Request, name: str) -> Response:
        corpus = corpora.get(turn_of(http), name)
        found = card(corpora, http, corpus)

        def content() -> bytes:
            return msgspec.json.encode({**found, "paths": [document.path for document in corpus.documents]})

        return Response(await in_turn(http, content, DOCUMENT_BYTES * len(corpus.documents)), media_type="application/json")

    return router


def card(corpora: Shelves, http: Request, corpus: Listing) -> dict[str, Any]:
    return {
        "object": "corpus",
        "name": corpus.name,
        "files": len(corpus.documents),
        "tokens": corpus.tokens,
        "bytes": corpus.size_bytes,
        "default": corpora.default_of(turn_of(http)) == corpus.name,
    }


def unnamed(texts: Sequence[str]) -> dict[str, str]:
    """Texts without a path, which get one that depends on the text: a text that is posted again is no other one."""
    return {f"text-{short_digest(text)}": text for text in texts}
