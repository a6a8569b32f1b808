"""The corpora of all principals: their bounds, names and defaults.

Promises that a principal sees, chooses and changes its own corpora only, that a change that fails leaves a corpus as it was,
and that nothing is encoded or indexed on the event loop.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.server.corpora.messages import Change, Listing, NewDocument, Outcome, decode_outcome, encode
from outrider.server.corpora.shelves import DEFAULT, FOLDER, Shelf, Shelves, Usage, short_digest
from outrider.server.engine.helper import Helper, HelperEnded
from outrider.server.file_errors import reason
from outrider.server.http.errors import APIError
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics

log = logging.getLogger("outrider")
# A principal has at most this many corpora.
MAX_CORPORA = 64
# A corpus has at most this many documents: each costs time at every change.
MAX_DOCUMENTS = 1 << 16
Encode = Callable[[Sequence[str]], Awaitable[list[NDArray[np.uint32]]]]


class Corpora(Shelves):
    """The corpora of one tokenizer, which change. All methods are called on the event loop."""

    def __init__(
        self, settings: Settings, fingerprint: Callable[[], str], separator: int, metrics: Metrics, usage: Usage | None = None
    ) -> None:
        """`fingerprint` computes the tokenizer's, `separator` is larger than every token id, `usage` is that of all models."""
        self._total_bytes = settings.corpora.total_bytes
        self._share_bytes = self._total_bytes // max(1, len(settings.auth.keys))
        self._sessions_folder = settings.sessions.folder
        self._fingerprint, self._separator, self._metrics = cache(fingerprint), separator, metrics
        self._indexer = Helper("outrider.server.corpora.indexer")
        self._temporary: Path | None = None
        self._usage = usage or Usage()
        super().__init__([] if self._sessions_folder is None else [self._root])
        self._record()

    def block(self, principal: str, name: str | None) -> str | None:
        """The file of a corpus that a request names, or of the principal's default. Raises APIError if it does not exist."""
        name = name or self.default_of(principal)
        if name is None:
            return None
        corpus = self.get(principal, name)
        return str(self._shelves[short_digest(principal)].folder_of(name) / corpus.block)

    async def change(
        self, principal: str, name: str, texts: Mapping[str, str], removed: Sequence[str], encode: Encode, default: bool | None
    ) -> Listing:
        """Adds `texts` by path to a corpus, which replace those of the same path, and removes others. Raises APIError."""
        shelf = self._shelves.setdefault(short_digest(principal), Shelf(self._root / short_digest(principal)))
        async with shelf.lock:
            corpus = shelf.corpora.get(name)
            if corpus is None and len(shelf.corpora) >= MAX_CORPORA:
                message = f"At most {MAX_CORPORA} corpora are kept for a key; delete one first."
                raise APIError(400, message, "name", "too_many")
            digests, paths, gone, count = await asyncio.to_thread(compare, corpus, texts, removed)
            if count > MAX_DOCUMENTS:
                message = (
                    f"The corpus would have {count} documents, and {MAX_DOCUMENTS} are allowed; post fewer, or larger ones."
                )
                raise APIError(400, message, "files", "too_many")
            if corpus is None or paths or gone:
                ids = await encode([texts[path] for path in paths])
                added = [NewDocument(path, digests[path], each.tobytes()) for path, each in zip(paths, ids, strict=True)]
                corpus = await self._index(shelf, name, gone, added)
            if default is not None and default != (shelf.default == name):
                await self._choose(shelf, name if default else None)
            return corpus

    async def delete(self, principal: str, name: str) -> None:
        """Deletes a corpus. Raises APIError if the principal has none of this name."""
        self.get(principal, name)
        shelf = self._shelves[short_digest(principal)]
        async with shelf.lock:
            self.get(principal, name)  # it may have been deleted meanwhile
            if shelf.default == name:
                await self._choose(shelf, None)
            del shelf.corpora[name]
            self._record()
            await asyncio.to_thread(shutil.rmtree, shelf.folder_of(name), ignore_errors=True)

    async def close(self) -> None:
        """Ends the process that indexes, and removes what is not kept."""
        await self._indexer.close()
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    async def _index(self, shelf: Shelf, name: str, removed: Sequence[str], added: list[NewDocument]) -> Listing:
        """The changed corpus. Raises APIError if it is too large or cannot be written."""
        async with self._usage.lock:
            elsewhere = await asyncio.to_thread(self._usage.elsewhere, self._home)
            here = self.sizes
            others = shelf.size_bytes(but=name)
            own = others + elsewhere[shelf.folder.name]
            everyone = here.total() - here[shelf.folder.name] + others + elsewhere.total()
            max_bytes = min(self._share_bytes - own, self._total_bytes - everyone)
            folder = str(shelf.folder_of(name))
            change = Change(folder, name, list(removed), added, self._separator, self._fingerprint(), max_bytes)
            try:
                answer = await self._indexer.ask(await asyncio.to_thread(encode, change))
                outcome = await asyncio.to_thread(decoded, answer)
            except HelperEnded:
                raise self._unavailable("the process that indexes has ended") from None
            except OSError as error:
                raise self._unavailable(reason(error)) from None
            if outcome.listing is not None:
                shelf.corpora[name] = outcome.listing
                self._record()
        if outcome.error:
            raise self._unavailable(outcome.error)
        if outcome.listing is None:
            message = (
                f"The corpus would take {outcome.size_bytes} bytes, and {max(0, max_bytes)} are left; post less text, delete a"
                " corpus, or raise corpora.total_bytes. Nothing was changed."
            )
            raise APIError(400, message, "files", "corpus_too_large")
        return outcome.listing

    async def _choose(self, shelf: Shelf, default: str | None) -> None:
        """Sets the default corpus. Raises APIError if it cannot be written."""
        try:
            await asyncio.to_thread((shelf.folder / DEFAULT).write_text, default or "")
        except OSError as error:
            raise self._unavailable(reason(error)) from None
        shelf.default = default

    def _unavailable(self, reason: str) -> APIError:
        log.error("a corpus cannot be changed: %s", reason)
        return APIError(503, "The corpus cannot be changed now, and is as before; try again shortly.", code="unavailable")

    def _record(self) -> None:
        self._usage.record(self._home, self.sizes)
        self._metrics.corpora.set(sum(len(shelf.corpora) for shelf in self._shelves.values()))
        self._metrics.corpora_bytes.set(sum(shelf.size_bytes() for shelf in self._shelves.values()))

    @property
    def _home(self) -> Path:
        """The folder of this model's corpora."""
        return Path() if self._sessions_folder is None else self._sessions_folder.expanduser() / FOLDER

    @cached_property
    def _root(self) -> Path:
        """The folder of this tokenizer's corpora, within the sessions' folder or a temporary one."""
        if self._sessions_folder is not None:
            return self._home / short_digest(self._fingerprint())
        self._temporary = Path(tempfile.mkdtemp(prefix="outrider-corpora-"))
        return self._temporary


def compare(
    corpus: Listing | None, texts: Mapping[str, str], removed: Sequence[str]
) -> tuple[dict[str, str], list[str], list[str], int]:
    """The digests of texts by path, the paths of those that are new, the documents to remove, and how many will remain."""
    old = {document.path: document.digest for document in corpus.documents} if corpus else {}
    digests = {path: short_digest(text) for path, text in texts.items()}
    paths = [path for path, digest in digests.items() if old.get(path) != digest]
    gone = list({path: None for path in removed if path in old and path not in texts})
    return digests, paths, gone, len(old.keys() | texts.keys()) - len(gone)


def decoded(answer: bytes) -> Outcome:
    """The outcome in the indexer's answer, with the sum of its tokens."""
    outcome = decode_outcome(answer)
    if outcome.listing is not None:
        _ = outcome.listing.tokens  # counted here, once, and not on the event loop
    return outcome
