"""The text files of a working tree: those that git tracks or would add, without large, binary and generated ones.

git itself applies .gitignore files and .git/info/exclude. A folder outside a repository is read as if it were one.
"""

import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.server.datastore_builder import DatastoreError

MAX_FILE_BYTES = 1_000_000
# Files whose mean line has more characters are taken for minified or generated.
MAX_MEAN_LINE = 400
# A generator leaves its mark in this many first characters.
HEAD_CHARACTERS = 2000
GENERATED_NAMES = re.compile(
    r"(^|/)(package-lock\.json|npm-shrinkwrap\.json|pnpm-lock\.yaml|go\.sum|[^/]*\.(lock|map|svg|min\.js|min\.css))$"
)
# These files hold secrets by convention, whether or not a .gitignore names them.
SECRET_NAMES = re.compile(r"(^|/)(\.env(\.[^/]*)?|\.netrc|\.npmrc|\.pypirc|id_[a-z0-9]+|[^/]*\.(pem|key|p12|pfx))$")
GENERATED_MARKS = re.compile(r"Code generated .* DO NOT EDIT|@generated\b")
LIST = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")


class Stamp(NamedTuple):
    """A file's identity: a file with an equal stamp has the same content."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class WorkingTree:
    """The files below `root`, without those below `store`. Needs git."""

    def __init__(self, root: Path, store: Path) -> None:
        """Raises DatastoreError if `root` is not a directory."""
        if not root.is_dir():
            raise DatastoreError(f"There is no directory {root}.")
        self.root = root.resolve()
        self._store = os.path.relpath(store.resolve(), self.root) + "/"
        self._empty: tempfile.TemporaryDirectory[str] | None = None  # the repository for a folder that is in none

    def close(self) -> None:
        """Deletes the temporary repository."""
        if self._empty is not None:
            self._empty.cleanup()

    def scan(self) -> dict[str, Stamp]:
        """The stamps of the files that may be indexed, by path. Raises DatastoreError."""
        found: dict[str, Stamp] = {}
        self._scan("", found)
        return found

    def _scan(self, folder: str, found: dict[str, Stamp]) -> None:
        for name in self._list(self.root / folder):
            path = os.path.join(folder, name)
            try:
                status = os.lstat(os.path.join(self.root, path))
            except OSError:
                continue  # deleted, but still in git's index
            if stat.S_ISDIR(status.st_mode):
                if (self.root / path / ".git").exists():  # a submodule, or another repository
                    self._scan(path, found)
            elif stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES and not self._excludes(path):
                found[path] = Stamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def _excludes(self, path: str) -> bool:
        return path.startswith(self._store) or any(names.search(path) for names in (GENERATED_NAMES, SECRET_NAMES))

    def _list(self, folder: Path) -> list[str]:
        """The paths that git lists in `folder`, without duplicates, in order."""
        try:
            listed = git(LIST, folder)
        except NoRepositoryError:
            if self._empty is None:
                self._empty = tempfile.TemporaryDirectory(prefix="outrider-")
                git(["init", "--quiet", self._empty.name], folder)
            listed = git(["--git-dir", f"{self._empty.name}/.git", "--work-tree", str(folder), *LIST], folder)
        return sorted(set(listed.split("\0")[:-1]))


class NoRepositoryError(DatastoreError):
    """The folder is in no git repository."""


def git(arguments: Sequence[str], folder: Path) -> str:
    """The output of a git command in `folder`. Raises DatastoreError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", *arguments]  # a repository's own fsmonitor is a program that git would run
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    except FileNotFoundError:
        if not folder.is_dir():
            raise DatastoreError(f"There is no directory {folder}.") from None
        raise DatastoreError("git is not installed; install it, as it tells which files of a directory are ignored.") from None
    if done.returncode:
        message = " ".join(done.stderr.decode(errors="replace").split()).removeprefix("fatal: ")
        if message.startswith("not a git repository"):
            raise NoRepositoryError(message)
        raise DatastoreError(f"git cannot list the files of {folder}: {message}")
    return os.fsdecode(done.stdout)


def read_file(root: Path, path: str) -> tuple[bytes, str]:
    """The content of a file below `root`, and its text if it is worth indexing, otherwise "".

    Both are empty if it cannot be read, or if it or one of its folders has become a symbolic link.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: open_below(root, name, flags)) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return b"", ""
    if len(data) > MAX_FILE_BYTES:
        return b"", ""
    if b"\0" in data:
        return data, ""
    text = data.decode(errors="replace")
    is_minified = len(text) > MAX_MEAN_LINE * (text.count("\n") + 1)
    return data, "" if is_minified or GENERATED_MARKS.search(text[:HEAD_CHARACTERS]) else text


def open_below(root: Path, path: str, flags: int) -> int:
    """Opens a regular file below `root` without following symbolic links; returns the descriptor. Raises OSError."""
    *folders, name = Path(path).parts
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for each in folders:
            parent, folder = folder, os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(parent)
        opened = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # a pipe would wait for its writer
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{path} is not a regular file")
    return opened
