"""Request bodies about corpora: Outrider's, and those of SGLang's routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from outrider.server.openai.fields import MAX_ENTRIES, Body, reject_unsupported

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


class ExternalCorpusBody(Body):
    """SGLang's POST /add_external_corpus."""

    corpus_id: CorpusName | None = None
    documents: Annotated[Texts, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        return reject_unsupported(body, {"file_path": (None,), "token_chunks": (None,)})


class RemoveCorpusBody(Body):
    """SGLang's POST /remove_external_corpus."""

    corpus_id: CorpusName
