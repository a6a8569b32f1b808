"""`outrider pull`, `list` and `remove`, over a cache of the hub as its own library writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

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


class Version(BaseHTTPRequestHandler):
    """Answers as a server whose model takes some memory."""

    memory: ClassVar[Any] = None

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": "1", "memory": self.memory}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    "memory", [{"file": 98_000_000, "weights": 96_000_000, "caches": 7_500_000_000, "rest": 70_000_000}, {"file": "x"}, None]
)
def test_the_memory_of_a_running_server_is_listed(cache: Path, memory: Any) -> None:
    handler = type("Handler", (Version,), {"memory": memory})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        listed = outrider(cache, "list", "--server.port", str(server.server_port)).stdout
        server.shutdown()
    line = f"The server at {server.server_port} uses: file 98 MB, weights 96 MB, caches up to 7500 MB, rest 70 MB."
    is_said = memory is not None and "weights" in memory
    assert [each.replace("http://127.0.0.1:", "") for each in listed.splitlines()[2:]] == [line] * is_said


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
