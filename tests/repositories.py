"""Small git repositories for tests."""

from collections.abc import Mapping
from pathlib import Path

from outrider.server.datastore_tree import git


def make_repository(root: Path, files: Mapping[str, str]) -> Path:
    """A new repository with untracked files, by path."""
    root.mkdir(parents=True)
    git(["init", "--quiet", "."], root)
    write(root, files)
    return root


def write(root: Path, files: Mapping[str, str]) -> None:
    """Writes files, by path below `root`."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
