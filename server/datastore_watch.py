"""Keeps a suffix datastore equal to a working tree.

An update tokenizes only the files that have changed, and splices them into the suffix array of the one block. The store has
a manifest, a block and the list of the files in it, in the order of the block. The previous block stays until the next
update, for a reader that has just read the previous manifest.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from outrider.drafters.tables import datastore
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.drafters.tables.splice import splice
from outrider.server import system
from outrider.server.batches import batches
from outrider.server.datastore_builder import BLOCK_TOKENS, DatastoreError
from outrider.server.datastore_tree import Stamp, WorkingTree, read_file
from outrider.verify.tokenizer import fingerprint, load_tokenizer

# The process that updates the store locks this file.
LOCK = "lock"
# This many characters are tokenized at a time.
BATCH_CHARACTERS = 1_000_000
# A tree that keeps changing is indexed after this many polls.
MAX_UNSETTLED_POLLS = 10
# The time between two polls is at least this multiple of the time that one takes.
IDLE_RATIO = 20


class Document(NamedTuple):
    """A file of the store."""

    path: str
    stamp: Stamp
    digest: str  # digest of its content
    tokens: int  # includes the separator that follows them; 0 = not indexed, for example a binary file


@dataclass(frozen=True)
class Listing:
    """The files of a block, in its order."""

    root: str
    documents: list[Document]


@dataclass(frozen=True)
class Update:
    """The changes by an update, and the store after it."""

    changed: int  # files added or edited
    deleted: int
    files: int
    tokens: int
    seconds: float


LISTING = TypeAdapter(Listing)


class WatchedStore:
    """A datastore of one block that is updated in place, by one process at a time."""

    def __init__(self, folder: Path, root: Path, tokenizer: str) -> None:
        """Continues the store in `folder`, if there is one. Raises ArrayFileError and ModelError."""
        self._tokenizer = load_tokenizer(tokenizer)
        self._separator = len(self._tokenizer)  # it is no token id
        self._fingerprint = fingerprint(self._tokenizer)
        self._folder = folder
        self._root = str(root)
        self._block = ""  # stem of the current block's file name
        self._lock = _lock(folder)
        try:
            self._documents = self._load()
        except DatastoreError:
            self.close()
            raise

    def close(self) -> None:
        """Lets other processes update the store."""
        self._lock.close()

    def update(self, files: Mapping[str, Stamp]) -> Update:
        """Makes the store hold the text of `files`. Writes nothing if the text is the same. Raises ArrayFileError."""
        started = time.perf_counter()
        old = {document.path: document for document in self._documents}
        kept = {path: old[path] for path, stamp in files.items() if path in old and old[path].stamp == stamp}
        added = list(self._tokenize(self._read_changed(files, old, kept)))
        documents = [kept[path] for path in old if path in kept] + [document for document, _ in added]
        indexed = [document.tokens - 1 for document in documents if document.tokens]
        if sum(indexed) > BLOCK_TOKENS:
            raise DatastoreError(
                f"{self._root} has {sum(indexed)} tokens of text, but at most {BLOCK_TOKENS} are indexed; watch a part of it."
            )
        removed = {path for path, document in old.items() if document.tokens and path not in kept}
        deleted = removed - files.keys()
        changed = removed - deleted | {document.path for document, _ in added if document.tokens}
        if changed or deleted or not (self._folder / datastore.MANIFEST).exists():
            remaining = np.repeat(
                np.array([path in kept for path in old], bool), [document.tokens for document in old.values()]
            )
            self._write(remaining, documents, [ids for _, ids in added])
        self._documents = documents
        return Update(len(changed), len(deleted), len(indexed), sum(indexed), time.perf_counter() - started)

    def _read_changed(
        self, files: Mapping[str, Stamp], old: Mapping[str, Document], kept: dict[str, Document]
    ) -> Iterator[tuple[Document, str]]:
        """The files with new content, and their text. Files that were only touched are added to `kept`."""
        for path in [path for path in files if path not in kept]:
            data, text = read_file(Path(self._root), path)
            digest = blake2b(data, digest_size=16).hexdigest()
            if path in old and old[path].digest == digest:
                kept[path] = old[path]._replace(stamp=files[path])
            else:
                yield Document(path, files[path], digest, 0), text

    def _tokenize(self, texts: Iterator[tuple[Document, str]]) -> Iterator[tuple[Document, NDArray[np.uint32]]]:
        """The documents with their numbers of tokens, and the tokens with the separator."""
        for batch in batches(texts, lambda each: len(each[1]), BATCH_CHARACTERS):
            ids = self._tokenizer([text for _, text in batch], add_special_tokens=False, verbose=False)["input_ids"]
            for (document, text), tokens in zip(batch, ids, strict=True):
                ending = [self._separator] if text else []
                found = np.array([*tokens, *ending], np.uint32)
                yield document._replace(tokens=len(found)), found

    def _write(self, remaining: NDArray[np.bool_], documents: list[Document], added: list[NDArray[np.uint32]]) -> None:
        """Writes the next block and its listing, and makes them current. `remaining`: bool [T], of the current block."""
        try:
            tokens, order = self._arrays() if len(remaining) else (np.empty(0, np.uint32), np.empty(0, np.uint32))
            new = np.concatenate([np.empty(0, np.uint32), *added])
            tokens, order = splice(tokens, order, remaining, new, self._separator)
            numbers = {int(path.name[:6]) for path in self._folder.glob("[0-9]*")}
            number = max(numbers, default=0) + 1
            block = self._folder / f"{number:06d}.block"
            datastore.save_block(block, tokens, self._separator, self._fingerprint, order)
            listing = Listing(self._root, documents)
            block.with_suffix(".json").write_bytes(LISTING.dump_json(listing))
            datastore.write_manifest(self._folder, [block.name])
            for path in self._folder.glob("[0-9]*"):
                if path.name[:6] not in (block.stem, self._block):
                    path.unlink()
            self._block = block.stem
        except OSError as error:
            raise DatastoreError(f"{self._folder} cannot be written ({error.strerror}).") from None

    def _arrays(self) -> tuple[NDArray[Any], NDArray[np.uint32]]:
        """The current block's tokens and suffix array. Raises ArrayFileError."""
        arrays = datastore.open_blocks(self._folder, self._fingerprint)[0].arrays
        return arrays["tokens"], arrays["order"]

    def _load(self) -> list[Document]:
        """The documents of the current block; none if there is no usable block. Raises DatastoreError."""
        try:
            self._block = datastore.block_paths(self._folder)[0].stem
            listing = LISTING.validate_json((self._folder / f"{self._block}.json").read_bytes())
            tokens, order = self._arrays()
        except (ArrayFileError, OSError, ValueError, IndexError):
            return []
        if listing.root != self._root:
            raise DatastoreError(f"{self._folder} is the datastore of {listing.root}; give another folder with --out.")
        ends = np.cumsum([document.tokens for document in listing.documents if document.tokens], dtype=np.int64)
        if len(tokens) != (ends[-1] if len(ends) else 0) or np.any(tokens[ends - 1] != self._separator):
            return []
        return [] if np.any(order >= len(tokens)) else listing.documents


class Watcher:
    """Updates a store after its tree has changed and is at rest."""

    def __init__(self, root: Path, folder: Path, tokenizer: str) -> None:
        """Raises DatastoreError."""
        self._tree = WorkingTree(root, folder)
        self._store = WatchedStore(folder, self._tree.root, tokenizer)
        self._indexed: dict[str, Stamp] | None = None  # the tree at the last update
        self._previous: dict[str, Stamp] = {}  # the tree at the last poll
        self._unsettled_polls = 0

    def close(self) -> None:
        self._store.close()
        self._tree.close()

    def update(self) -> Update:
        """Updates the store at once. Raises DatastoreError."""
        self._unsettled_polls = 0
        self._previous = self._indexed = self._tree.scan()
        return self._store.update(self._indexed)

    def poll(self) -> Update | None:
        """Updates the store if the tree has changed and two polls agree. Returns None if no text has changed."""
        files = self._tree.scan()
        if files == self._indexed:
            return None
        if files != self._previous and self._unsettled_polls < MAX_UNSETTLED_POLLS:
            self._previous = files
            self._unsettled_polls += 1
            return None
        update = self.update()
        return update if update.changed or update.deleted else None


def _lock(folder: Path) -> IO[bytes]:
    """The locked file of a new store, or of an existing one that no other process has locked."""
    if folder.is_dir() and not (folder / LOCK).exists() and any(folder.iterdir()):
        raise DatastoreError(f"{folder} was not made by `outrider datastore watch`; give a new folder with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("ab")
    except OSError as error:
        raise DatastoreError(f"{folder} cannot be written ({error.strerror}); give another folder with --out.") from None
    try:
        system.lock(lock, wait=False)
    except OSError:
        lock.close()
        raise DatastoreError(f"{folder} is updated by another `outrider datastore watch`; end that first.") from None
    return lock


def watch(watcher: Watcher, interval_seconds: float, report: Callable[[Update], None]) -> None:
    """Updates the store now and whenever the tree changes, until SIGINT or SIGTERM; reports each update."""
    handlers = {name: signal.signal(name, signal.default_int_handler) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        report(watcher.update())
        while True:
            started = time.monotonic()
            if update := watcher.poll():
                report(update)
                continue
            time.sleep(max(interval_seconds, IDLE_RATIO * (time.monotonic() - started)))
    except KeyboardInterrupt:
        pass
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
