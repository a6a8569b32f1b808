"""The folder of saved sessions, which several servers may share; one file each.

Files are readable by the owner only, and written under another name first. Those of another model, dtype, kv_dtype, version or
layout are in another folder. Promises that a process removes only what it knows: never a file that another has written since.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError

from outrider.drafters.interface import Ints
from outrider.server.worker.prefix_index import block_hashes
from outrider.server.worker.session_format import UNREADABLE, Contents, Fits, StoredSession, open_session, write_session
from outrider.verify.checkpoint import DEFAULT_REVISION, GGUF, locate
from outrider.verify.model.cache.paging import Page
from outrider.verify.model.runner import ModelRunner

log = logging.getLogger("outrider.worker")
SUFFIX, PARTIAL, TEMPORARY = ".session", ".partial", ".tmp*"  # safetensors writes the last ones
LOCK = ".lock"
ROOT = 0  # the user who may own the folder that is set, such as a mounted volume
LAYOUT = 2  # of a file; another number is in another folder
MAX_CANDIDATES = 16  # files that may continue one text


class ForeignFolder(Exception):
    """Somebody else may read or replace the files in a folder; the message says what to do."""


class Identity(NamedTuple):
    """Which version of a file it is."""

    inode: int
    mtime_ns: int


class SessionFiles:
    """The files of the sessions of one model, bounded in bytes; the least recently saved are removed first."""

    def __init__(self, folder: Path, model: str, max_bytes: int, fits: Fits) -> None:
        """`model` identifies the weights, the dtype and the version. Removes what an interrupted writer has left.

        Raises ForeignFolder if the folder belongs to another user.
        """
        check_owner(folder, (os.geteuid(), ROOT))
        check_owner(folder / model, (os.geteuid(),))
        self._folder = folder / model
        self._max_bytes = max_bytes
        self._fits = fits
        self._known: dict[Path, Identity] = {}  # files as this process has written or read them
        self._ignored: dict[Path, Identity] = {}  # damaged files
        self._listed: dict[Path, tuple[int, list[Path]]] = {}  # a principal's files, and when its folder had changed
        self._sweep()

    def path_of(self, principal: str, name: str | None, text: Ints) -> Path:
        """The file of a session; a new one for a session without a name, found by the beginning of its text."""
        file = f"{beginning(principal, text)}-{uuid.uuid4().hex}" if name is None else hidden(name)
        return self._owned(principal) / f"{file}{SUFFIX}"

    def save(self, path: Path, contents: Contents, stopped: Callable[[], bool], rows_read: Callable[[], None]) -> bool:
        """Writes a session to its file; returns False if it was stopped, or if it failed, which is logged.

        Calls `rows_read` when it needs the rows no longer.
        """
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
        complete = False
        try:
            for each in (self._folder.parent, self._folder, path.parent):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)  # of the last one
            with open(partial, "xb", opener=private) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or its process has ended
                complete = write_session(file, contents, stopped)
                rows_read()
                if complete:
                    file.flush()
                    os.fsync(file.fileno())
                    with self._locked():
                        os.replace(partial, path)
                        self._known[path] = identity(path)
        except (OSError, SafetensorError) as error:
            complete = False
            log.warning("a session could not be saved in %s: %s", self._folder, error)
        finally:
            rows_read()
            if not complete:
                with contextlib.suppress(OSError):
                    partial.unlink()
        self._trim()
        return complete

    def remove(self, path: Path) -> None:
        """Removes a session's file, unless another process has written it since; logs one line if that is not possible."""
        known = self._known.pop(path, None)
        try:
            with self._locked():
                if known is not None and identity(path) == known:
                    self._ignored[path] = known  # if it cannot be removed
                    path.unlink(missing_ok=True)
                    del self._ignored[path]
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("a session's file could not be removed: %s", error)

    def is_current(self, path: Path) -> bool:
        """Whether no other process has written or removed the file since this one has known it."""
        with contextlib.suppress(OSError):
            return identity(path) == self._known.get(path)
        return False

    def load(self) -> Iterator[StoredSession]:
        """The stored sessions, least recently saved first. Rows are read when they are needed.

        A principal's sessions with equal pages share them.
        """
        shared: dict[tuple[str, str], Page] = {}
        for path in self._sizes(SUFFIX):
            if stored := self.open(path, shared):
                yield stored

    def open(self, path: Path, shared: dict[tuple[str, str], Page] | None = None) -> StoredSession | None:
        """The session in a file; None if it is no session of this model, which is logged."""
        try:
            self._known[path] = found = identity(path)
            if self._ignored.get(path) == found:
                return None
            return open_session(path, self._fits, {} if shared is None else shared)
        except FileNotFoundError:
            return None
        except (*UNREADABLE, KeyError, IndexError, ValueError) as error:
            self._ignored[path] = self._known[path]
            log.warning("%s is not a session of this model and is ignored: %s", path, error)
            return None

    def candidates(self, principal: str, name: str | None, prompt: Ints | None) -> list[Path]:
        """The files that may hold the session of this name, or one that begins like `prompt`."""
        found = [self._owned(principal) / f"{hidden(name)}{SUFFIX}"] if name is not None else []
        if prompt is not None and (begins := beginning(principal, prompt)):
            found += [path for path in self._files_of(principal) if path.name.startswith(begins)][-MAX_CANDIDATES:]
        return [path for path in found if path.exists()]

    def _files_of(self, principal: str) -> list[Path]:
        folder = self._owned(principal)
        with contextlib.suppress(OSError):
            changed_at = folder.stat().st_mtime_ns
            if self._listed.get(folder, (0, []))[0] != changed_at:
                self._listed[folder] = changed_at, [path for path in folder.iterdir() if path.suffix == SUFFIX]
            return self._listed[folder][1]
        return []

    def _owned(self, principal: str) -> Path:
        return self._folder / hidden(principal)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes the other processes."""
        with open(self._folder / LOCK, "ab", opener=private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sizes(self, *suffixes: str) -> dict[Path, int]:
        """The files with their sizes, least recently saved first."""
        found: dict[Path, os.stat_result] = {}
        for suffix in suffixes:
            with contextlib.suppress(OSError):
                for path in self._folder.glob(f"*/{suffix}" if suffix == TEMPORARY else f"*/*{suffix}"):
                    with contextlib.suppress(OSError):  # another process has just removed it
                        found[path] = path.stat()
        return {path: found[path].st_size for path in sorted(found, key=lambda path: found[path].st_mtime_ns)}

    def _sweep(self) -> None:
        """Removes files that a process was writing when it ended."""
        for path in self._sizes(PARTIAL, TEMPORARY):
            if path.suffix != PARTIAL and not path.name.startswith(TEMPORARY.rstrip("*")):
                continue
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer would hold it
                path.unlink()

    def _trim(self) -> None:
        sizes = self._sizes(SUFFIX, PARTIAL)
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total > self._max_bytes and path.suffix == SUFFIX:
                self._known[path] = Identity(0, 0)
                with contextlib.suppress(OSError):
                    self._known[path] = identity(path)
                self.remove(path)
                total -= size


def check_owner(folder: Path, owners: tuple[int, ...]) -> None:
    """Raises ForeignFolder if somebody else may read or replace what is in a folder. One that does not exist is made later."""
    try:
        found = folder.stat()
    except OSError:
        return
    is_shared = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in owners or is_shared:
        raise ForeignFolder(
            f"{folder} belongs to another user, or all users may write to it, so no sessions are saved in it; set"
            " sessions.folder to a folder of your own."
        )


def identity(path: Path) -> Identity:
    """Which version of a file it is. Raises OSError."""
    found = path.stat()
    return Identity(found.st_ino, found.st_mtime_ns)


def private(path: str, flags: int) -> int:
    """Opens a file that only its owner can read."""
    return os.open(path, flags, 0o600)


def hidden(name: str) -> str:
    """A name of a file, or of a folder, that does not show what it stands for."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def beginning(principal: str, text: Ints) -> str:
    """What the names of the files of texts that begin like this one begin with; empty for short texts."""
    return next((digest.hex() for digest in block_hashes(principal, text)), "")


def model_digest(path: str, runner: ModelRunner, revision: str = DEFAULT_REVISION) -> str:
    """Identifies what determines a session's rows: the files of the weights, configuration, dtypes, shapes and versions."""
    location = locate(path, revision)
    folder = Path(location.source)
    if not folder.is_dir():  # a hub id; the cache has a folder per commit
        known = location.gguf or "config.json"
        folder = Path(try_to_load_from_cache(location.source, known, revision=revision) or path).parent
    weights = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", GGUF))
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    shape = runner.cache_shape
    parts = [LAYOUT, path, folder.name, files, runner.model.config.to_json_string(), str(shape.dtype), shape.device.type]
    parts.append(str(shape.stored_dtype))
    parts += [shape.layers, runner.weight_bytes, version("outrider"), torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
