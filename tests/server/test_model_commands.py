"""`outrider pull`, `list` and `remove`, over a cache of the hub as its own library writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with one model of 1,000 bytes."""
    repository = tmp_path / "hub" / "models--owner--small"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs" / "weights").write_bytes(bytes(1000))
    (repository / "snapshots" / COMMIT / "model.safetensors").symlink_to(repository / "blobs" / "weights")
    return tmp_path


def outrider(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "outrider.server.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_models_are_listed_and_removed(cache: Path) -> None:
    (cache / "a.gguf").write_bytes(bytes(2000))
    listed = outrider(cache, "list", "--models.paths", f'["{cache / "a.gguf"}"]')
    assert listed.returncode == 0, listed.stderr
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert lines[1][:3] == ["a", "2.0", "kB"] and lines[2][:3] == ["owner/small", "1.0", "kB"]
    assert outrider(cache, "remove", "owner/small").stdout == "Removed owner/small: 1.0 kB.\n"
    assert not (cache / "hub" / "models--owner--small" / "blobs").exists()
    assert outrider(cache, "list").stdout.startswith("No models: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("remove", "owner/other"), "The hub's cache has no model owner/other; outrider list shows"),
        (("pull", "small"), "small is no Hugging Face id; give owner/name"),
        (("pull", "owner/name/a.gguf"), "owner/name/a.gguf cannot be downloaded: "),
        (("list", "--models.paths", '["nowhere"]'), "nowhere in models.paths is no file"),
    ],
)
def test_errors_are_one_sentence(cache: Path, arguments: tuple[str, ...], words: str) -> None:
    found = outrider(cache, *arguments)
    assert found.returncode == 2
    assert words in found.stderr and len(found.stderr.splitlines()) == 1
