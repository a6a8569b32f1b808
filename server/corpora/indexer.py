"""The program that indexes corpora, so that neither the event loop nor a running stream waits for it.

A change splices new texts into the suffix array of the corpus's one block. The block is a new file and the listing, which
names it, is replaced last, so that a change happens as a whole or not at all. The block before stays until the next change,
for requests that have just chosen it.
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.tables import datastore
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.drafters.tables.splice import splice
from outrider.server.corpora import messages
from outrider.server.engine.helper import answer_all
from outrider.server.file_errors import reason

# Requests run first.
NICENESS = 5
SUFFIX = ".block"


def main(argument: str) -> None:
    """Answers changes from the socket until the front end closes it."""
    answer_all(argument, lambda message: messages.encode(answer(messages.decode_change(message))), NICENESS)


def answer(change: messages.Change) -> messages.Outcome:
    """The outcome of a change, also of one that fails."""
    try:
        return apply(change)
    except (ArrayFileError, OSError, MemoryError) as error:
        return messages.Outcome(error=f"{type(error).__name__}: {reason(error, *block_paths(change.folder), change.folder)}")


def apply(change: messages.Change) -> messages.Outcome:
    """Makes a change. Raises ArrayFileError and OSError."""
    folder = Path(change.folder)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not messages.is_private(folder.parent):
        raise PermissionError(errno.EACCES, "its folder is not this user's own")
    before = read_listing(folder)
    old = before.documents if before else []
    gone = {*change.removed, *(document.path for document in change.added)}
    kept = np.repeat(np.array([each.path not in gone for each in old], bool), [each.tokens for each in old])
    added = [with_separator(each, change.separator) for each in change.added]
    tokens, order = arrays(folder / before.block, change.fingerprint) if before else (np.empty(0, np.uint32),) * 2
    text = np.concatenate([np.empty(0, np.uint32), *added])
    tokens, order = splice(tokens, order, kept, text, change.separator)
    block = folder / f"{1 + max((int(path.stem) for path in block_paths(folder)), default=0):06d}{SUFFIX}"
    datastore.save_block(block, tokens, change.separator, change.fingerprint, order)
    new = [messages.Document(each.path, each.digest, len(ids)) for each, ids in zip(change.added, added, strict=True)]
    documents = [each for each in old if each.path not in gone] + new
    size_bytes = block.stat().st_size + messages.listed_bytes(documents)
    if size_bytes > change.max_bytes:
        block.unlink()
        return messages.Outcome(size_bytes=size_bytes)
    listing = messages.Listing(change.name, block.name, size_bytes, documents)
    partial = folder / f"{messages.LISTING}.partial"
    partial.write_bytes(messages.encode_listing(listing))
    os.replace(partial, folder / messages.LISTING)
    for path in block_paths(folder):
        if path.name not in (block.name, before and before.block):
            path.unlink()
    return messages.Outcome(listing, size_bytes)


def block_paths(folder: Path | str) -> list[Path]:
    return list(Path(folder).glob("*" + SUFFIX))


def with_separator(document: messages.NewDocument, separator: int) -> NDArray[np.uint32]:
    """The ids of a text and the separator after them; nothing for an empty text."""
    ids = np.frombuffer(document.ids, np.uint32)
    return np.append(ids, np.uint32(separator)) if len(ids) else ids


def arrays(block: Path, fingerprint: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """A block's tokens and suffix array. Raises ArrayFileError."""
    found = datastore.open_block(block, fingerprint).arrays
    return found["tokens"], found["order"]


def read_listing(folder: Path) -> messages.Listing | None:
    """The listing of a corpus; None if the folder has none that can be read."""
    try:
        return messages.decode_listing(messages.read_file(folder / messages.LISTING))
    except (OSError, ValueError):
        return None
