"""The folder of a model's saved sessions, which several servers may share: its files, their sizes, and a lock.

Every principal has a folder of its own. Files are readable by the owner only, and written under another name first, so whatever
has its name is complete. Knows nothing about what the files hold.
"""

import contextlib
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from outrider.server import system

LOCK = ".lock"
SESSION, PAGE = ".session", ".page"
# A file has this suffix while it is written.
PARTIAL = ".partial"
# Root may own the folder that is set, such as a mounted volume.
ROOT = 0
Identity: TypeAlias = tuple[int, int]


class ForeignFolder(Exception):
    """Somebody else may read or replace the files in a folder; the message says what to do."""


class SessionFolder:
    """The folder of one model in the folder that the settings name."""

    def __init__(self, root: Path, model: str) -> None:
        """Removes what an interrupted writer has left. Raises ForeignFolder if the folder belongs to another user."""
        check_owner(root, (os.geteuid(), ROOT))
        check_owner(root / model, (os.geteuid(),))
        self._root, self._path = root, root / model
        self._remove_partial()

    def __str__(self) -> str:
        return str(self._path)

    def of(self, principal: str) -> Path:
        """The folder of a principal, whose name does not show whose it is."""
        return self._path / hidden(principal)

    def make(self, folder: Path) -> None:
        """Makes a principal's folder. Raises OSError."""
        for each in (self._root, self._path, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)  # `mode` applies to the last folder only

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes the other processes. Raises OSError."""
        with open(self._path / LOCK, "ab", opener=system.open_regular) as lock:
            system.lock(lock)
            yield

    def sizes(self, *suffixes: str) -> dict[Path, int]:
        """The files with these suffixes and their sizes, least recently written first."""
        found: dict[Path, os.stat_result] = {}
        with contextlib.suppress(OSError):
            for path in self._path.glob("*/*"):
                if path.suffix in suffixes:
                    with contextlib.suppress(OSError):  # another process has just removed it
                        found[path] = path.stat()
        return {path: found[path].st_size for path in sorted(found, key=lambda path: found[path].st_mtime_ns)}

    def remove(self, path: Path, min_age_seconds: float = 0.0) -> bool:
        """Removes a file that was last touched so long ago; returns whether it is gone."""
        try:
            with self.locked():
                if time.time() - path.stat().st_mtime < min_age_seconds:
                    return False
                path.unlink()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _remove_partial(self) -> None:
        """Removes files that a process was writing when it ended."""
        for path in self._path.glob("*/*"):
            if path.suffix not in (SESSION, PAGE):
                with contextlib.suppress(OSError), open(path, "rb", opener=system.open_regular) as file:
                    system.lock(file, wait=False)  # its writer would hold it
                    path.unlink()


@contextlib.contextmanager
def partial_file(folder: Path) -> Iterator[BinaryIO]:
    """A new file, which is removed at the end unless it was renamed. Raises OSError."""
    path = folder / f"{uuid.uuid4().hex}{PARTIAL}"
    with open(path, "xb", opener=system.open_regular) as file:
        system.lock(file)  # the lock is held until the file is closed, or its process has ended
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def flush(file: BinaryIO) -> None:
    """Returns when the file's contents are on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def touch(path: Path) -> bool:
    """Makes a file the most recent one; returns whether it exists."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def identity(path: Path) -> Identity:
    """Identifies the version of a file. Raises OSError."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


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


def hidden(name: str) -> str:
    """A name of a file, or of a folder, that does not show what it stands for."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
