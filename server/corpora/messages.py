"""Messages between the front end and the process that indexes corpora, and the listing of a corpus in its folder."""

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from outrider.server.system import open_regular

# This file of a corpus's folder lists its documents, in the order of the block, and names the block.
LISTING = "corpus.json"
# A document takes this much beside its path and its tokens: its digest, and objects of both processes.
DOCUMENT_BYTES = 256


class Document(msgspec.Struct, frozen=True, array_like=True):
    """A text of a corpus."""

    path: str  # the client's name of it
    digest: str  # digest of the text
    tokens: int  # includes the separator that follows them; 0 = the text is empty


class Listing(msgspec.Struct, frozen=True, dict=True):
    """The name, block and documents of a corpus."""

    name: str
    block: str  # file name
    size_bytes: int  # of the block and of what the documents take beside it
    documents: list[Document] = []

    @cached_property
    def tokens(self) -> int:
        """The tokens of all texts, without separators."""
        return sum(max(0, document.tokens - 1) for document in self.documents)


class NewDocument(msgspec.Struct, frozen=True):
    """A text that is new in a corpus, or replaces the one of the same path."""

    path: str
    digest: str
    ids: bytes  # uint32 [N]; token ids


class Change(msgspec.Struct, frozen=True):
    folder: str
    name: str
    removed: list[str]  # paths
    added: list[NewDocument]
    separator: int  # larger than every token id
    fingerprint: str  # of the tokenizer
    max_bytes: int  # a larger corpus is not kept


class Outcome(msgspec.Struct, frozen=True):
    """The corpus after a change; None if it is as before, because of the `size_bytes` that the change needs, or an `error`."""

    listing: Listing | None = None
    size_bytes: int = 0
    error: str = ""


def listed_bytes(documents: Iterable[Document]) -> int:
    """The bytes that documents take beside the block, even with empty text."""
    return sum(DOCUMENT_BYTES + len(document.path.encode("utf-8", "surrogatepass")) for document in documents)


def is_private(folder: Path) -> bool:
    """Whether nobody else may read or replace what is in a folder that exists."""
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def read_file(path: Path) -> bytes:
    """A file's content. Raises OSError, also for a pipe, which would never end, and for a link."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


encode = msgspec.msgpack.Encoder().encode
decode_change = msgspec.msgpack.Decoder(Change).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
encode_listing = msgspec.json.Encoder().encode
decode_listing = msgspec.json.Decoder(Listing).decode
