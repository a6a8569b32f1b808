"""The saved sessions of one model: a file for each session, and one for each page that sessions of one principal share.

A page's file is named by its digest, so a session that is saved again writes the pages that are new, and its own file.
Promises that a process removes only what it knows: never a session that another has written since, nor a page that one names.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from weakref import WeakValueDictionary

from outrider.drafters.interface import Ints
from outrider.server.file_errors import reason
from outrider.server.settings import Settings
from outrider.server.worker.storage import session_format
from outrider.server.worker.storage.contents import Contents, Stopped
from outrider.server.worker.storage.prefix_index import block_hashes
from outrider.server.worker.storage.session_folder import (
    PAGE,
    PARTIAL,
    SESSION,
    ForeignFolder,
    Identity,
    SessionFolder,
    flush,
    hidden,
    identity,
    partial_file,
    touch,
)
from outrider.server.worker.storage.tensor_file import write_tensors
from outrider.verify.checkpoint import DEFAULT_REVISION, GGUF, locate
from outrider.verify.hub import here
from outrider.verify.model.cache.kv_cache import Page
from outrider.verify.model.runner import ModelRunner

log = logging.getLogger("outrider.worker")
# At most this many files are compared because they may continue one text.
MAX_CANDIDATES = 16
# The version of the files' layout is part of the digest that names their folder, so files of another version are never read.
LAYOUT = 4
# A younger page without a session may still get one, because another server may be saving it.
UNNAMED_SECONDS = 60.0


class SessionFiles:
    """The files of the sessions of one model, bounded in bytes; the least recently saved are removed first."""

    def __init__(self, folder: Path, model: str, max_bytes: int, fits: session_format.Fits) -> None:
        """`model` identifies the weights, the dtype and the version. Removes what an interrupted writer has left.

        Raises ForeignFolder if the folder belongs to another user.
        """
        self._folder = SessionFolder(folder, model)
        self._max_bytes = max_bytes
        self._fits = fits
        self._pages: WeakValueDictionary[Path, Page] = WeakValueDictionary()  # pages in memory, by their files
        self._known: dict[Path, Identity] = {}  # sessions as this process has written or read them
        self._ignored: dict[Path, Identity] = {}  # damaged files
        self._listed: dict[Path, tuple[int, list[Path]]] = {}  # a principal's sessions, and the modification time of its folder
        self._sweep_at = math.inf  # time.monotonic()
        self.sweep()

    def path_of(self, principal: str, name: str | None, text: Ints) -> Path:
        """The file of a session; a new one for a session without a name, found by the beginning of its text."""
        file = f"{beginning(principal, text)}-{uuid.uuid4().hex}" if name is None else hidden(name)
        return self._folder.of(principal) / f"{file}{SESSION}"

    def save(self, path: Path, contents: Contents) -> None:
        """Writes a session to its file, unless it is stopped. A failure is logged."""
        self._sweep_at = time.monotonic() + UNNAMED_SECONDS
        try:
            self._folder.make(path.parent)
            self._write(path, contents)
        except OSError as error:
            log.warning("a session could not be saved in %s: %s", self._folder, reason(error))
        except Stopped:
            pass
        self._trim()

    def _write(self, path: Path, contents: Contents) -> None:
        """`save`. Raises Stopped or OSError."""
        for index, page in enumerate(contents.pages):
            if page.digest is None or not touch(session_format.page_path(path.parent, page.digest)):
                self._write_page(path.parent, page, contents, index)
        rest = contents.rest()
        with partial_file(path.parent) as file:
            labels = contents.labels(rest)
            write_tensors(file, contents.tensors(rest), labels)
            flush(file)
            with self._folder.locked():
                for named in session_format.named_pages(path, labels):
                    named.stat()  # another process may have removed it while the folder was too large
                os.replace(file.name, path)
                self._known[path] = identity(path)

    def _write_page(self, folder: Path, page: Page, contents: Contents, index: int) -> None:
        """Writes a page, in place of a file of its name, which may be damaged. Raises Stopped or OSError."""
        rows = contents.page(index)
        digest = session_format.rows_digest(rows)
        with partial_file(folder) as file:
            write_tensors(file, {session_format.ROWS: rows})
            flush(file)
            os.replace(file.name, path := session_format.page_path(folder, digest))
        page.digest = digest
        self._pages[path] = page

    def remove(self, path: Path, with_pages: bool = False) -> None:
        """Removes a session's file, unless another process has written it since; logs one line if that is not possible.

        The pages that only this session names go with it, or are left to `sweep`.
        """
        known = self._known.pop(path, None)
        self._sweep_at = time.monotonic() + UNNAMED_SECONDS
        try:
            with self._folder.locked():
                if known is None or identity(path) != known:
                    return
                pages = self._own_pages(path) if with_pages else []
                self._ignored[path] = known  # the file may be impossible to remove
                for each in (path, *pages):
                    each.unlink(missing_ok=True)
                del self._ignored[path]
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("a session's file could not be removed from %s: %s", self._folder, reason(error))

    def is_current(self, path: Path) -> bool:
        """Whether no other process has written or removed the file since this one has known it."""
        with contextlib.suppress(OSError):
            return identity(path) == self._known.get(path)
        return False

    def load(self) -> Iterator[session_format.StoredSession]:
        """The stored sessions, least recently saved first. Rows are read when they are needed.

        A principal's sessions with equal pages share them.
        """
        for path in self._folder.sizes(SESSION):
            if stored := self.open(path):
                yield stored

    def open(self, path: Path) -> session_format.StoredSession | None:
        """The session in a file; None if it is no session of this model, which is logged."""
        try:
            self._known[path] = found = identity(path)
        except OSError:
            return None
        if self._ignored.get(path) == found:
            return None
        try:
            return session_format.open_session(path, self._fits, self._pages)
        except (*session_format.UNREADABLE, KeyError) as error:
            if self.is_current(path):  # otherwise another process has just removed or replaced it
                self._ignored[path] = found
                log.warning("a file in %s is no session of this model and is ignored: %s", self._folder, reason(error))
            return None

    def candidates(self, principal: str, name: str | None, prompt: Ints | None) -> list[Path]:
        """The files that may hold the session of this name, or one that begins like `prompt`."""
        folder = self._folder.of(principal)
        found = [folder / f"{hidden(name)}{SESSION}"] if name is not None else []
        if prompt is not None and (begins := beginning(principal, prompt)):
            found += [path for path in self._sessions_in(folder) if path.name.startswith(begins)][-MAX_CANDIDATES:]
        return [path for path in found if path.exists()]

    def _sessions_in(self, folder: Path) -> list[Path]:
        with contextlib.suppress(OSError):
            changed_at = folder.stat().st_mtime_ns
            if self._listed.get(folder, (0, []))[0] != changed_at:
                self._listed[folder] = changed_at, [path for path in folder.iterdir() if path.suffix == SESSION]
            return self._listed[folder][1]
        return []

    @property
    def sweep_is_due(self) -> bool:
        """Whether pages may have been left that no session names."""
        return time.monotonic() >= self._sweep_at

    def sweep(self) -> None:
        """Removes the pages that no session names, unless they are new."""
        self._sweep_at = math.inf
        pages = self._folder.sizes(PAGE)
        named = set(chain.from_iterable(self._pages_by_session().values()))
        for path in pages.keys() - named:
            if not self._folder.remove(path, UNNAMED_SECONDS):
                self._sweep_at = time.monotonic() + UNNAMED_SECONDS

    def _own_pages(self, path: Path) -> set[Path]:
        sessions = self._pages_by_session()
        return set(sessions.pop(path, [])).difference(*sessions.values())

    def _pages_by_session(self) -> dict[Path, list[Path]]:
        """The pages that each session names; without the sessions whose files are damaged."""
        found: dict[Path, list[Path]] = {}
        for path in self._folder.sizes(SESSION):
            with contextlib.suppress(*session_format.UNREADABLE, KeyError):
                found[path] = session_format.named_pages(path, session_format.labels_of(path))
        return found

    def _trim(self) -> None:
        """Removes what no session names, then the least recently saved sessions, while the folder is too large."""
        tried: set[Path] = set()
        while sum((sizes := self._folder.sizes(SESSION, PAGE, PARTIAL)).values()) > self._max_bytes:
            if not tried:
                self.sweep()
            oldest = next((path for path in sizes if path.suffix == SESSION and path not in tried), None)
            if oldest is None:
                return
            tried.add(oldest)
            with contextlib.suppress(OSError):
                self._known[oldest] = identity(oldest)
            self.remove(oldest, with_pages=True)


def beginning(principal: str, text: Ints) -> str:
    """The beginning of the file names of all texts that begin like this one; empty for short texts."""
    return next((digest.hex() for digest in block_hashes(principal, text)), "")


def model_digest(path: str, runner: ModelRunner, revision: str = DEFAULT_REVISION) -> str:
    """Identifies what determines a session's rows: the files of the weights, configuration, dtypes, shapes and versions."""
    location = locate(path, revision)
    folder = Path(location.source)
    if not folder.is_dir():  # a hub id; the cache has a folder per commit
        known = location.gguf or "config.json"
        folder = (here(location.source, known, revision) or Path(path)).parent
    weights = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", GGUF))
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    shape = runner.cache_shape
    parts = [LAYOUT, path, folder.name, files, runner.description, str(shape.dtype), str(shape.stored_dtype)]
    parts += [shape.device.type, shape.layers, runner.weight_bytes, version("outrider"), runner.library]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def session_files(settings: Settings, runner: ModelRunner) -> SessionFiles | None:
    """The folder of saved sessions, if one is set and is the user's own."""
    folder, model = settings.sessions.folder, settings.model
    if folder is None:
        return None
    digest = model_digest(model.path, runner, model.revision)
    try:
        return SessionFiles(folder.expanduser(), digest, settings.sessions.folder_bytes, session_format.Fits.of(runner))
    except ForeignFolder as error:
        log.error("%s", error)
        return None
